"""`trivet bench`: a module for each subcommand, and a folder for each kind of thing that they measure."""
