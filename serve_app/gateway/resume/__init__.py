"""Streams that go on without their client, and without the gateway that began them."""
