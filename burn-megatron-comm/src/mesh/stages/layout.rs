//! The parser of layout strings such as `Et*3|(tt|)*2,L`, which assign layers to pipeline stages.

use super::{SplitError, StageLayout};

/// The maximum number of letters of a layout after expansion.
const MAX_LETTERS: usize = 1 << 16;

/// A syntax error in a layout string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutSyntaxError {
    /// The layout contains an invalid character.
    #[error(
        "invalid character '{found}' in the layout: expected E (embedding), t (layer), L (loss), \
         | (next stage), ( ) or *; commas and spaces are ignored"
    )]
    Unknown {
        /// The invalid character.
        found: char,
    },
    /// The layout contains multi-token-prediction layers, which are not supported.
    #[error("m (multi-token prediction) is not supported: remove it")]
    FurtherToken,
    /// The layout contains the embedding or the loss twice.
    #[error("{letter} occurs twice in the layout: expected it once")]
    Twice {
        /// The repeated letter, `E` or `L`.
        letter: char,
    },
    /// The embedding (`E`) is not at the start of the layout.
    #[error("E (embedding) must be the first letter")]
    EmbeddingNotFirst,
    /// The loss (`L`) is not at the end of the layout.
    #[error("L (loss) must be the last letter")]
    LossNotLast,
    /// The layout has no embedding (`E`).
    #[error("the layout has no embedding: start it with E")]
    NoEmbedding,
    /// The layout has no loss (`L`).
    #[error("the layout has no loss: end it with L")]
    NoLoss,
    /// The layout has no layers (`t`).
    #[error("the layout has no layers: add a t for each layer")]
    NoLayers,
    /// A star in the layout is not followed by a number.
    #[error("expected a count of 1 or more after *")]
    NoCount,
    /// A star in the layout has no letter or group before it that could be repeated.
    #[error("nothing to repeat before *: expected a letter, | or )")]
    StrayStar,
    /// A parenthesis is not closed.
    #[error("unclosed (")]
    Unclosed,
    /// A closing parenthesis has no opening parenthesis.
    #[error("unmatched )")]
    Unopened,
    /// A group in parentheses is not followed by a star and a number.
    #[error("expected a count after the group, as in (tt|)*2")]
    GroupWithoutCount,
    /// The layout has too many letters after expansion.
    #[error("this count makes the layout longer than {longest} letters")]
    TooLong {
        /// The maximum number of letters after expansion.
        longest: usize,
    },
}

/// A character of the layout and its position.
type Letter = (char, usize);

/// Parses a layout string in the format of Megatron-LM, such as `Et*3|(tt|)*2,L`. Returns the layout of each pipeline
/// stage, in order.
///
/// `E` is the embedding, which must come first and only once. Each `t` is a layer. `L` is the loss, which must come
/// last and only once. `|` begins the next stage. Stages may be empty. `x*n` repeats the letter `x` `n` times, and
/// `(...)*n` repeats a group `n` times. Groups may be nested. Commas and spaces are ignored.
///
/// # Errors
///
/// [`SplitError::Syntax`], with the position of the invalid character.
pub fn parse_layout(text: &str) -> Result<Vec<StageLayout>, SplitError> {
    let error = |(fault, at)| SplitError::Syntax {
        text: text.into(),
        at,
        fault,
    };
    let end = text.chars().count();
    let letters = expand(text, end).map_err(error)?;
    check(&letters, end).map_err(error)?;
    let mut stages = vec![];
    let mut layers = 0;
    for stage in letters.split(|(letter, _)| *letter == '|') {
        let has = |wanted| stage.iter().any(|(letter, _)| *letter == wanted);
        let start = layers;
        layers += stage.iter().filter(|(letter, _)| *letter == 't').count();
        stages.push(StageLayout {
            embedding: has('E'),
            layers: start..layers,
            loss: has('L'),
        });
    }
    Ok(stages)
}

/// Expands all repetitions. Returns the letters and stage separators, each with its position in the text.
fn expand(text: &str, end: usize) -> Result<Vec<Letter>, (LayoutSyntaxError, usize)> {
    let skipped = |letter: char| letter == ',' || letter.is_whitespace();
    let mut rest = (0..end)
        .zip(text.chars())
        .filter(|(_, letter)| !skipped(*letter))
        .peekable();
    let mut letters = vec![];
    // The starts of the open groups, in the letters and in the text.
    let mut open = vec![];
    while let Some((at, letter)) = rest.next() {
        let repeated = match letter {
            '(' => {
                open.push((letters.len(), at));
                continue;
            }
            ')' => open.pop().ok_or((LayoutSyntaxError::Unopened, at))?.0,
            'E' | 't' | 'L' | '|' => {
                letters.push((letter, at));
                letters.len() - 1
            }
            'm' => return Err((LayoutSyntaxError::FurtherToken, at)),
            '*' => return Err((LayoutSyntaxError::StrayStar, at)),
            found => return Err((LayoutSyntaxError::Unknown { found }, at)),
        };
        let Some((star, _)) = rest.next_if(|(_, letter)| *letter == '*') else {
            if letter == ')' {
                return Err((LayoutSyntaxError::GroupWithoutCount, at));
            }
            continue;
        };
        let mut digits = String::new();
        while let Some((_, digit)) = rest.next_if(|(_, letter)| letter.is_ascii_digit()) {
            digits.push(digit);
        }
        repeat(&mut letters, repeated, &digits).map_err(|fault| (fault, star))?;
    }
    match open.pop() {
        Some((_, at)) => Err((LayoutSyntaxError::Unclosed, at)),
        None => Ok(letters),
    }
}

/// Repeats the letters from index `first` to the end.
fn repeat(letters: &mut Vec<Letter>, first: usize, digits: &str) -> Result<(), LayoutSyntaxError> {
    if digits.trim_start_matches('0').is_empty() {
        return Err(LayoutSyntaxError::NoCount);
    }
    let repeated = letters.split_off(first);
    // A count that exceeds `usize` is also too long, except for an empty group.
    let count = digits.parse().unwrap_or(usize::MAX);
    let length = repeated.len().saturating_mul(count);
    if letters.len().saturating_add(length) > MAX_LETTERS {
        return Err(LayoutSyntaxError::TooLong {
            longest: MAX_LETTERS,
        });
    }
    letters.extend(repeated.iter().cycle().take(length));
    Ok(())
}

/// Checks that E is first, L is last, and that there are layers.
fn check(letters: &[Letter], end: usize) -> Result<(), (LayoutSyntaxError, usize)> {
    let places = |wanted: char| {
        let is = move |(_, (letter, _)): &(usize, &Letter)| *letter == wanted;
        letters.iter().enumerate().filter(is)
    };
    for letter in ['E', 'L'] {
        if let Some((_, (_, at))) = places(letter).nth(1) {
            return Err((LayoutSyntaxError::Twice { letter }, *at));
        }
    }
    match places('E').next() {
        None => return Err((LayoutSyntaxError::NoEmbedding, 0)),
        Some((0, _)) => {}
        Some((_, (_, at))) => return Err((LayoutSyntaxError::EmbeddingNotFirst, *at)),
    }
    match places('L').next() {
        None => return Err((LayoutSyntaxError::NoLoss, end)),
        Some((i, _)) if i + 1 == letters.len() => {}
        Some((_, (_, at))) => return Err((LayoutSyntaxError::LossNotLast, *at)),
    }
    match places('t').next() {
        Some(_) => Ok(()),
        None => Err((LayoutSyntaxError::NoLayers, end)),
    }
}
