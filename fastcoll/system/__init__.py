"""Access to the operating system: processes, mappings, addresses, interfaces."""
