"""Cards and links, from data sheets or measured on this machine."""
