//! Splits PTX into words.

use super::Malformed;

/// A word and its line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token<'a> {
    pub word: Word<'a>,
    pub line: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Word<'a> {
    /// `ld.global.v4.f32`, `%r1`, `.reg`, `$L__BB0_2`: letters, digits and `._$%`, and `::` inside.
    Name(&'a str),
    /// Digits: `12`, `0x1F`, `0f3F800000`, `1.5`.
    Number(&'a str),
    /// `"..."`, without the quotes.
    Text(&'a str),
    /// Any other character.
    Mark(char),
}

/// Splits a text into words, without comments.
pub(super) fn lex(text: &str) -> Result<Vec<Token<'_>>, Malformed> {
    let mut tokens = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '\n' => {
                line += 1;
                1
            }
            _ if first.is_whitespace() || first == '\0' => first.len_utf8(),
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => {
                let end = rest.find("*/").ok_or_else(|| Malformed {
                    line,
                    what: "a comment has no end".into(),
                })?;
                line += rest[..end].matches('\n').count();
                end + 2
            }
            '"' => {
                let end = rest[1..].find('"').ok_or_else(|| Malformed {
                    line,
                    what: "a string has no end".into(),
                })?;
                tokens.push(Token {
                    word: Word::Text(&rest[1..=end]),
                    line,
                });
                end + 2
            }
            _ => {
                let (word, length) = word(rest, first);
                tokens.push(Token { word, line });
                length
            }
        };
        rest = &rest[length..];
    }
    Ok(tokens)
}

fn word(rest: &str, first: char) -> (Word<'_>, usize) {
    let run = |inside: fn(char) -> bool| rest.find(|c| !inside(c)).unwrap_or(rest.len());
    if first.is_ascii_digit() {
        let length = run(|c| c.is_ascii_alphanumeric() || c == '.');
        return (Word::Number(&rest[..length]), length);
    }
    if first.is_ascii_alphabetic() || "._$%".contains(first) {
        // `.reg.b32` is two words, as written by inline assembly.
        if first == '.' {
            let length = rest[1..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let length = length.map_or(rest.len(), |length| 1 + length);
            return (Word::Name(&rest[..length]), length);
        }
        let mut length = 0;
        loop {
            let inside = |c: char| c.is_ascii_alphanumeric() || "._$%".contains(c);
            let more = rest[length..].find(|c| !inside(c));
            length += more.unwrap_or(rest.len() - length);
            // `cp.async.bulk.shared::cluster`
            if !rest[length..].starts_with("::") {
                return (Word::Name(&rest[..length]), length);
            }
            length += 2;
        }
    }
    (Word::Mark(first), first.len_utf8())
}
