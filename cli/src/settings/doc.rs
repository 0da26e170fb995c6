//! Doc comments as text for the terminal and the reference page.

/// Returns a doc comment as plain text: without the targets of links, and with spaces instead of line breaks.
pub fn plain(doc: &str) -> String {
    let (mut text, mut rest) = (String::new(), doc);
    while let Some(start) = rest.find('[') {
        let (before, link) = rest.split_at(start);
        text += before;
        let end = link.find(']').map_or(link.len(), |end| end + 1);
        let (label, after) = link.split_at(end);
        let target = after
            .strip_prefix('(')
            .and_then(|target| target.split_once(')'));
        let is_name = label.starts_with("[`");
        match target {
            Some((_, after)) => (text, rest) = (text + label.trim_matches(['[', ']']), after),
            None if is_name => (text, rest) = (text + label.trim_matches(['[', ']']), after),
            None => (text, rest) = (text + label, after),
        }
    }
    text += rest;
    // As flags and the keys of a recipe write it.
    let text = text.replace("`None`", "`none`");
    let paragraphs = text.split("\n\n").map(|paragraph| {
        let words: Vec<_> = paragraph.split_whitespace().collect();
        words.join(" ")
    });
    // Examples in a code block are for those who read the documentation of the library.
    let paragraphs = paragraphs.take_while(|paragraph| !paragraph.starts_with("```"));
    paragraphs.collect::<Vec<_>>().join("\n\n")
}
