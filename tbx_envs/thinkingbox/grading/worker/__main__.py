"""Starts the check worker; importing this module does nothing."""

if __name__ == "__main__":
    from check_server.forking import main

    main()
