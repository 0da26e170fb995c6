//! Splits prose into sentences.

/// Abbreviations that do not end a sentence.
const ABBREVIATIONS: [&str; 5] = ["e.g.", "i.e.", "cf.", "vs.", "al."];

/// A sentence, with the number of the line on which it starts.
#[derive(Debug, PartialEq)]
pub struct Sentence {
    pub line: usize,
    pub text: String,
}

/// Splits a paragraph, given as numbered lines, into sentences of at least two words.
///
/// Code in backticks is not split. Link addresses are left out.
pub fn sentences(paragraph: &[(usize, &str)]) -> Vec<Sentence> {
    let words = words(paragraph);
    let mut sentences = vec![];
    let mut start = 0;
    for (at, (_, word)) in words.iter().enumerate() {
        let next = words.get(at + 1);
        if next.is_none_or(|(_, next)| ends(word) && begins(next)) {
            let sentence = &words[start..=at];
            if sentence.len() > 1 {
                let texts: Vec<_> = sentence.iter().map(|(_, text)| text.as_str()).collect();
                sentences.push(Sentence {
                    line: sentence[0].0,
                    text: texts.join(" "),
                });
            }
            start = at + 1;
        }
    }
    sentences
}

/// Splits numbered lines into words. A blank within backticks does not split a word.
fn words(lines: &[(usize, &str)]) -> Vec<(usize, String)> {
    let (mut words, mut word) = (vec![], (0, String::new()));
    let (mut in_code, mut in_address) = (false, false);
    for (number, line) in lines {
        for c in line.chars().chain(['\n']) {
            if in_address {
                in_address = c != ')';
            } else if c.is_whitespace() && !in_code {
                if !word.1.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            } else if c == '(' && !in_code && word.1.ends_with(']') {
                in_address = true;
            } else {
                in_code ^= c == '`';
                if word.1.is_empty() {
                    word.0 = *number;
                }
                word.1.push(if c.is_whitespace() { '\u{a0}' } else { c });
            }
        }
    }
    if !word.1.is_empty() {
        words.push(word);
    }
    words
}

/// Returns whether a sentence may end with this word.
fn ends(word: &str) -> bool {
    let word = word.trim_end_matches([')', ']', '*', '_', '"', '\'']);
    word.ends_with(['.', '!', '?']) && !word.ends_with("..") && !ABBREVIATIONS.contains(&word)
}

/// Returns whether a sentence may begin with this word.
fn begins(word: &str) -> bool {
    word.starts_with(|c: char| c.is_uppercase() || c.is_numeric() || "`\"([*_".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, String)> {
        let lines: Vec<_> = (1..).zip(text.lines()).collect();
        let sentences = sentences(&lines).into_iter();
        sentences.map(|s| (s.line, s.text)).collect()
    }

    #[test]
    fn sentences_end_before_the_next_beginning() {
        let text = "A rank sends, e.g. Burn's\ntensors. It waits (a while.) `x` ends.";
        let wanted = [
            (1, "A rank sends, e.g. Burn's tensors."),
            (2, "It waits (a while.)"),
            (2, "`x` ends."),
        ];
        assert_eq!(texts(text), wanted.map(|(line, s)| (line, s.to_owned())));
        assert_eq!(texts("Burn 0.22 and v1. two")[0].1, "Burn 0.22 and v1. two");
    }

    #[test]
    fn code_stays_together_and_addresses_are_left_out() {
        let text = "Run `a. B\nc` or [see it. Now](b.md#c).";
        assert_eq!(
            texts(text),
            [(1, "Run `a.\u{a0}B\u{a0}c` or [see it.".into())]
        );
    }

    #[test]
    fn single_words_are_no_sentence() {
        assert_eq!(texts("Yes."), []);
    }
}
