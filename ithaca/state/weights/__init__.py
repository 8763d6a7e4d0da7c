"""Placement of weights over ranks with FSDP2, and the checks that keep every use of them exact."""
