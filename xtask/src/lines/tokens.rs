//! Splits a Rust file into tokens, without blanks and comments.

/// A word, a literal or another character.
pub struct Token<'a> {
    pub text: &'a str,
    first_line: usize,
    last_line: usize,
}

impl Token<'_> {
    /// Returns the line numbers of the token.
    pub fn lines(&self) -> impl Iterator<Item = usize> + use<> {
        self.first_line..=self.last_line
    }
}

/// Splits a text into tokens. If the text ends within a literal or a comment, the token ends there.
pub fn tokens(text: &str) -> Vec<Token<'_>> {
    let (mut rest, mut line) = (text, 1);
    let mut tokens = vec![];
    while let Some(first) = rest.chars().next() {
        let (length, is_code) = if first.is_whitespace() {
            (first.len_utf8(), false)
        } else if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), false)
        } else if rest.starts_with("/*") {
            (block_comment(rest), false)
        } else {
            (token_length(rest, first), true)
        };
        let (text, after) = rest.split_at(length);
        let last_line = line + text.matches('\n').count();
        if is_code {
            tokens.push(Token {
                text,
                first_line: line,
                last_line,
            });
        }
        (rest, line) = (after, last_line);
    }
    tokens
}

/// Returns the length of the comment at the beginning. Comments may be nested.
fn block_comment(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        depth += match rest {
            [b'/', b'*', ..] => 1,
            [b'*', b'/', ..] => -1,
            _ => {
                at += 1;
                continue;
            }
        };
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

fn token_length(text: &str, first: char) -> usize {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    match first {
        '"' => quoted(text, '"'),
        '\'' if is_character(text) => quoted(text, '\''),
        _ if is_word(first) => {
            let word = text.find(|c| !is_word(c)).unwrap_or(text.len());
            let (prefix, after) = text.split_at(word);
            word + match prefix {
                "r" | "br" | "cr" => raw_string(after),
                "b" | "c" if after.starts_with('"') => quoted(after, '"'),
                "b" if after.starts_with('\'') => quoted(after, '\''),
                _ => 0,
            }
        }
        _ => first.len_utf8(),
    }
}

/// Returns whether the quote begins a character literal rather than a lifetime.
fn is_character(text: &str) -> bool {
    let mut after = text.chars().skip(1);
    after.next() == Some('\\') || after.next() == Some('\'')
}

/// Returns the length of a literal that ends at the next quote without a backslash before it.
fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of a raw string after its prefix, or 0 for another word, such as `r#type`.
fn raw_string(text: &str) -> usize {
    let hashes = text.len() - text.trim_start_matches('#').len();
    let Some(content) = text[hashes..].strip_prefix('"') else {
        return 0;
    };
    let end = format!("\"{}", "#".repeat(hashes));
    let found = content.find(&end).map(|at| at + end.len());
    hashes + 1 + found.unwrap_or(content.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<&str> {
        tokens(text).iter().map(|token| token.text).collect()
    }

    #[test]
    fn literals_are_one_token() {
        assert_eq!(texts("a(\"//\\\"{\")"), ["a", "(", "\"//\\\"{\"", ")"]);
        assert_eq!(
            texts("r#\"a\"b\"# r\"\\\" br\"{\""),
            ["r#\"a\"b\"#", "r\"\\\"", "br\"{\""]
        );
        assert_eq!(
            texts("'{' '\\'' b'\"' b\"}\""),
            ["'{'", "'\\''", "b'\"'", "b\"}\""]
        );
        assert_eq!(texts("&'a r#type"), ["&", "'", "a", "r", "#", "type"]);
    }

    #[test]
    fn comments_are_none() {
        assert_eq!(texts("a // b\n/* c /* d */ e */ f /// g"), ["a", "f"]);
        let lines: Vec<_> = tokens("a\n\n/*\n*/ \"b\nc\" d")
            .iter()
            .map(|token| token.lines().collect::<Vec<_>>())
            .collect();
        assert_eq!(lines, [vec![1], vec![4, 5], vec![5]]);
    }
}
