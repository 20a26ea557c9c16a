"""One cost model: parameters, FLOPs, bytes and seconds of every layer from the spec, without building modules."""
