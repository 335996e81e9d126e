"""Streams that go on without their client: their events are numbered and kept, and sent again from any number on."""
