"""The original's HTTP session API: `tbx serve`."""
