"""What the command line and the Python handle ask a running server over HTTP."""
