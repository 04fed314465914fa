"""The commands that operate a cluster; cluster/cli.py lists them and all others."""
