"""OpenTelemetry: requests' traces as spans, exported by OTLP where the standard variables say so."""
