"""Training under DeepSpeed: process group, engine, exact gradient scale, artifacts."""
