//! The markers of sentences that are hard to read.
//!
//! A marker is a hint, not a fault: a sentence with a marker may be clear, and a sentence without a marker may be
//! unclear.

use std::fmt;

use super::count_word;

/// Phrases that replace a noun, invert the word order, or are outdated. They match as whole words.
const PHRASES: [&str; 45] = [
    // A pronoun in place of a noun.
    "that of",
    "those of",
    "of those",
    "of it",
    "of which",
    "which of",
    "by which",
    "the latter",
    "the former",
    "of yours",
    "of one's own",
    // A clause in place of a noun.
    "of what",
    "by what",
    "to what",
    "with what",
    "from what",
    "what it",
    "nothing of",
    // Numbers and amounts.
    "so many",
    "as many",
    "as much",
    "so much",
    "at the least",
    "at the most",
    "is none",
    "are none",
    "if there is one",
    // Prepositions and adverbs.
    "beside",
    "another than",
    "of its own",
    "by itself",
    "by way of",
    "by the clock",
    "save for",
    "but for",
    "anew",
    "likewise",
    // Software described as a person.
    "knows",
    "sees",
    "wants",
    "hears",
    "forgets",
    "tells",
    "is told",
    "without a word",
];

/// Opening words of item documentation that starts with a clause instead of a verb or a noun.
const OPENINGS: [&str; 6] = ["What", "That", "How", "As", "Of", "By"];

/// The maximum number of words of a sentence that is not marked.
const LONGEST: usize = 40;

/// A marker of a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Marker {
    /// The sentence contains a phrase.
    Phrase(&'static str),
    /// The documentation of an item starts with this word.
    Opening(&'static str),
    /// The sentence is too long.
    Long,
}

impl fmt::Display for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phrase(phrase) => f.write_str(phrase),
            Self::Opening(word) => write!(f, "{word} .."),
            Self::Long => write!(f, "over {LONGEST} words"),
        }
    }
}

/// Returns the phrases of a sentence, one marker per occurrence. Code in backticks does not count.
pub fn phrases(sentence: &str) -> Vec<Marker> {
    let text: String = sentence.split('`').step_by(2).collect::<Vec<_>>().join("`");
    let text = text.to_lowercase();
    let repeated = PHRASES
        .iter()
        .flat_map(|phrase| std::iter::repeat_n(*phrase, count_word(&text, phrase)));
    repeated.map(Marker::Phrase).collect()
}

/// Returns the phrases of a sentence, and whether it is too long.
pub fn markers(sentence: &str) -> Vec<Marker> {
    let words = sentence.split(' ');
    let words = words.filter(|word| word.contains(char::is_alphanumeric));
    let long = (words.count() > LONGEST).then_some(Marker::Long);
    phrases(sentence).into_iter().chain(long).collect()
}

/// Returns the marker of the first word of the documentation of an item.
pub fn opening(sentence: &str) -> Option<Marker> {
    let first = sentence.split(' ').next()?;
    let word = OPENINGS.iter().find(|word| **word == first)?;
    Some(Marker::Opening(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrases_are_whole_words_in_any_case() {
        let that = Marker::Phrase("that of");
        assert_eq!(phrases("Its size is that of the other."), [that]);
        assert_eq!(phrases("That of a, and that of b."), [that, that]);
        assert_eq!(phrases("Besides, that often helps."), []);
        assert_eq!(phrases("The field `beside` of `that of`."), []);
    }

    #[test]
    fn long_sentences_are_marked() {
        let words = |count| vec!["word"; count].join(" - ");
        assert_eq!(markers(&words(40)), []);
        assert_eq!(markers(&words(41)), [Marker::Long]);
    }

    #[test]
    fn openings_are_first_words() {
        assert_eq!(opening("By what it is."), Some(Marker::Opening("By")));
        assert_eq!(opening("Bytes of a row."), None);
        assert_eq!(opening("The rank. As before."), None);
    }
}
