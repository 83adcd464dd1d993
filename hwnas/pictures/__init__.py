"""What every picture shares: style, and labels that do not overlap. Knows no word of the domain."""
