"""Small web servers on loopback: who may ask, and how they run."""
