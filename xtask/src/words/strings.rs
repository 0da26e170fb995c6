//! Reads the string literals of Rust files: errors, help and other output.

use crate::lines::tokens::{Token, tokens};

use super::markdown;
use super::sentences::Sentence;

/// Returns the sentences of each string literal in a file.
pub fn literals(text: &str) -> Vec<Vec<Sentence>> {
    let tokens = tokens(text);
    let literals = tokens.iter().filter_map(sentences_of);
    literals.filter(|found| !found.is_empty()).collect()
}

/// Returns the sentences of a string literal, or `None` for another token.
fn sentences_of(token: &Token<'_>) -> Option<Vec<Sentence>> {
    let prefix = token.text.split('"').next()?;
    let is_string = ["", "r", "b", "br", "c", "cr"].contains(&prefix.trim_end_matches('#'));
    let content = token.text[prefix.len()..].strip_prefix('"')?;
    if !is_string {
        return None;
    }
    let content = content.trim_end_matches('#').trim_end_matches('"');
    let first = token.lines().next()?;
    let text = if prefix.starts_with(['r']) || prefix.starts_with("br") {
        content.to_owned()
    } else {
        unescape(content)
    };
    // Sentences are found in the text. Each sentence is reported with the first line of the literal.
    let sentences = markdown::read(text.lines().map(|line| (first, line)));
    Some(sentences)
}

/// Replaces the escapes that matter for words: line ends, continued lines and quotes.
fn unescape(content: &str) -> String {
    let mut text = String::new();
    let mut rest = content.chars().peekable();
    while let Some(c) = rest.next() {
        match (c, rest.peek()) {
            ('\\', Some('\n')) => while rest.next_if(|c| c.is_whitespace()).is_some() {},
            ('\\', Some('n')) => {
                rest.next();
                text.push('\n');
            }
            ('\\', Some(_)) => text.extend(rest.next()),
            _ => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, String)> {
        let sentences = literals(text).into_iter().flatten();
        sentences.map(|s| (s.line, s.text)).collect()
    }

    #[test]
    fn literals_are_read_and_other_tokens_are_not() {
        let text = "// \"no text\"\nlet a = 'x';\nf(\"one \\\"text\\\" \\\n   here\", r#\"raw \"text\" here\"#, \"x\");";
        let wanted = [(3, "one \"text\" here"), (4, "raw \"text\" here")];
        assert_eq!(texts(text), wanted.map(|(line, s)| (line, s.to_owned())));
    }

    #[test]
    fn a_line_may_end_within_a_sentence() {
        assert_eq!(texts("\"two\\nlines\""), [(1, "two lines".into())]);
        assert_eq!(
            texts("\"two lines\\n\\nhere and there\""),
            [(1, "two lines".into()), (1, "here and there".into())]
        );
    }
}
