//! Reads the documentation of items in Rust files.

use std::collections::BTreeSet;

use crate::lines::tokens::tokens;

/// The documentation of an item or a module: its numbered lines, without the slashes.
pub type Item<'a> = Vec<(usize, &'a str)>;

/// Returns the documentation of all items of a file, public and private.
pub fn items(text: &str) -> Vec<Item<'_>> {
    // A literal of several lines may contain lines that look like documentation.
    let tokens = tokens(text);
    let inside: BTreeSet<_> = tokens
        .iter()
        .flat_map(|token| token.lines().skip(1))
        .collect();
    let mut items: Vec<Item<'_>> = vec![];
    let mut previous = None;
    for (number, line) in (1..).zip(text.lines()) {
        let read = (!inside.contains(&number))
            .then(|| doc_line(line))
            .flatten();
        if let Some((mark, text)) = read {
            match items.last_mut() {
                Some(item) if previous == Some(mark) => item.push((number, text)),
                _ => items.push(vec![(number, text)]),
            }
        }
        previous = read.map(|(mark, _)| mark);
    }
    items
}

/// Returns the marker of a documentation line, `///` or `//!`, and the text after it.
fn doc_line(line: &str) -> Option<(&str, &str)> {
    let (mark, text) = line.trim_start().split_at_checked(3)?;
    let is_doc = mark == "//!" || (mark == "///" && !text.starts_with('/'));
    is_doc.then_some((mark, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_lines_are_an_item() {
        let text = "//! The crate.\n/// One.\n/// Two.\nfn a() {} // no\n//// no\n    /// Three.\n";
        let wanted: [&[_]; 3] = [
            &[(1, " The crate.")],
            &[(2, " One."), (3, " Two.")],
            &[(6, " Three.")],
        ];
        assert_eq!(items(text), wanted);
    }

    #[test]
    fn literals_hold_no_documentation() {
        assert_eq!(items("let a = \"x\n/// y\n\";\n/// z\n"), [vec![(4, " z")]]);
    }
}
