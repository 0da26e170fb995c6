//! What another process says, made fit for a terminal.

/// The most characters of a name: a host, a version, an address.
const NAME: usize = 255;

/// The most characters of a text: an error, a verdict.
const TEXT: usize = 16 << 10;

/// A name with everything escaped that is no character to see (control characters, the escapes of a
/// terminal, marks that turn the direction of a line), cut at 255 characters.
pub fn printable_name(name: &str) -> String {
    escaped(name, NAME, &[])
}

/// A text in the same way, but for ends of lines and tabs, cut at 16384 characters.
pub fn printable_text(text: &str) -> String {
    escaped(text, TEXT, &['\n', '\t'])
}

fn escaped(text: &str, most: usize, kept: &[char]) -> String {
    let mut shown = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == most {
            shown.push_str("...");
            break;
        }
        match c {
            // Which `escape_debug` would quote.
            '\'' | '"' | '\\' => shown.push(c),
            _ if kept.contains(&c) => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    shown
}
