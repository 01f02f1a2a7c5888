"""What the operating system knows: processes, mappings, addresses, interfaces."""
