"""`tandem doctor`: what is wrong with this machine or this installation, before anything runs."""
