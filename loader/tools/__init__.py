"""The command line `fusecache dataset`."""
