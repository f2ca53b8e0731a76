"""From the recordings of a run to what people look at: `timeline` puts them together, `idle` says who left the device
waiting, `summary` counts, `chrome`, `table` and `page` show. Values in, values out; no process is asked anything."""
