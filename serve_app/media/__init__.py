"""Files that clients send, decoded: pictures to pixels, sound to samples. In a process of its own, within limits."""
