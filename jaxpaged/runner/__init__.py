"""From a `StepPlan` to token ids: buckets, packing, compiled programs and the KV pool."""
