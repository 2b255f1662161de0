"""From files into stores."""
