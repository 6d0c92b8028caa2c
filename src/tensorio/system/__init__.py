"""What the operating system says of memory, disks and processes, and what it is asked to do with pages."""
