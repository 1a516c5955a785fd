"""The KV-cache transfer protocol, written once over the waist."""
