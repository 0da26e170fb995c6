//! Text from another process, escaped for a terminal.

/// The most characters of a name: a host, a version, an address.
const MAX_NAME: usize = 255;

/// The most characters of a text: an error, a failure report.
const MAX_TEXT: usize = 16 << 10;

/// A name with everything escaped that is not a printable character (control characters, terminal escape
/// sequences, bidirectional marks), truncated to 255 characters.
pub fn printable_name(name: &str) -> String {
    escaped(name, MAX_NAME, &[])
}

/// A text, escaped likewise except for newlines and tabs, truncated to 16384 characters.
pub fn printable_text(text: &str) -> String {
    escaped(text, MAX_TEXT, &['\n', '\t'])
}

fn escaped(text: &str, most: usize, kept: &[char]) -> String {
    let mut shown = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == most {
            shown.push_str("...");
            break;
        }
        match c {
            // `escape_debug` would escape these.
            '\'' | '"' | '\\' => shown.push(c),
            _ if kept.contains(&c) => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    shown
}
