"""One module per engine that is compared. Each runs as a process and obeys `command_loop`."""
