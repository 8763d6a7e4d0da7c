"""`ithaca rehearse`: one rank of a cluster's job, run and measured on one device."""
