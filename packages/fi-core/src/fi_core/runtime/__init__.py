"""What turns a call into a kernel, in one direction: spec, build, resolve, launch; env and errors beside them."""
