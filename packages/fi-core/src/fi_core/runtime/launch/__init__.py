"""From a spec to a call: binds found files to tvm-ffi functions and dispatches tensors to them."""
