//! Functions that escape text from another process before it is printed on a terminal.

/// The maximum number of characters of a name, such as a host, a version or an address.
const MAX_NAME: usize = 255;

/// The maximum number of characters of a text, such as an error or a failure report.
const MAX_TEXT: usize = 16 << 10;

/// Escapes all non-printable characters of a name and truncates the result to 255 characters. Non-printable characters
/// are control characters, terminal escape sequences and bidirectional marks.
pub fn printable_name(name: &str) -> String {
    escaped(name, MAX_NAME, &[])
}

/// Escapes the non-printable characters of a text except newlines and tabs, and truncates the result to 16384
/// characters. See [`printable_name`].
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
            // `escape_debug` would escape these characters too.
            '\'' | '"' | '\\' => shown.push(c),
            _ if kept.contains(&c) => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    shown
}
