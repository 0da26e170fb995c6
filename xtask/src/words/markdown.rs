//! Reads the sentences of Markdown.

use super::sentences::{Sentence, sentences};

/// The minimum number of words of a table cell that counts as a sentence.
const SHORTEST_CELL: usize = 4;

/// Returns the sentences of a text, given as numbered lines. They come from paragraphs, list items and table cells.
///
/// Headings, code blocks and HTML are left out.
pub fn read<'a>(lines: impl IntoIterator<Item = (usize, &'a str)>) -> Vec<Sentence> {
    let mut reader = Reader::default();
    let mut in_code = false;
    for (number, line) in lines {
        let line = line.trim().trim_start_matches("> ");
        if line.starts_with("```") || line.starts_with("~~~") {
            in_code = !in_code;
            reader.end_paragraph();
        } else if in_code {
        } else if line.is_empty() || line.starts_with(['#', '<']) || is_definition(line) {
            reader.end_paragraph();
        } else if line.starts_with('|') {
            reader.end_paragraph();
            reader.row(number, line);
        } else if let Some(item) = item(line) {
            reader.end_paragraph();
            reader.paragraph.push((number, item));
        } else {
            reader.paragraph.push((number, line));
        }
    }
    reader.end_paragraph();
    reader.sentences
}

#[derive(Default)]
struct Reader<'a> {
    /// The lines of the current paragraph.
    paragraph: Vec<(usize, &'a str)>,
    sentences: Vec<Sentence>,
}

impl Reader<'_> {
    fn end_paragraph(&mut self) {
        self.sentences.extend(sentences(&self.paragraph));
        self.paragraph.clear();
    }

    fn row(&mut self, number: usize, line: &str) {
        for cell in line.split('|') {
            if cell.split_whitespace().count() >= SHORTEST_CELL {
                self.sentences.extend(sentences(&[(number, cell)]));
            }
        }
    }
}

/// Returns the text of a list item.
fn item(line: &str) -> Option<&str> {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = number.len() < line.len();
    match numbered {
        true => number.strip_prefix(". "),
        false => ["- ", "* "].iter().find_map(|mark| line.strip_prefix(mark)),
    }
}

/// Returns whether a line defines the address of a link: `[name]: address`.
fn is_definition(line: &str) -> bool {
    line.starts_with('[') && line.contains("]: ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, String)> {
        let sentences = read((1..).zip(text.lines())).into_iter();
        sentences.map(|s| (s.line, s.text)).collect()
    }

    #[test]
    fn paragraphs_items_and_cells_are_read() {
        let text = "# A heading\n\nOne paragraph.\nTwo lines.\n- first item\n2. second item\n   goes on\n\n\
                    | a | this cell is long |\n|---|---|\n```sh\nnot this\n```\n<img src=x>\n[a b]: c\n";
        let wanted = [
            (3, "One paragraph."),
            (4, "Two lines."),
            (5, "first item"),
            (6, "second item goes on"),
            (9, "this cell is long"),
        ];
        assert_eq!(texts(text), wanted.map(|(line, s)| (line, s.to_owned())));
    }

    #[test]
    fn a_number_within_a_line_is_no_item() {
        assert_eq!(texts("1.5 of them"), [(1, "1.5 of them".into())]);
    }
}
