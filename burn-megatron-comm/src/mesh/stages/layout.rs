//! Layout strings such as `Et*3|(tt|)*2,L`.

use super::{SplitError, StageLayout};

/// The maximum number of letters of a layout after expansion.
const MAX_LETTERS: usize = 1 << 16;

/// A syntax error in a layout string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutSyntaxError {
    /// An unknown character.
    #[error(
        "invalid character '{found}' in the layout: expected E (embedding), t (layer), L (loss), \
         | (next stage), ( ) or *; commas and spaces are ignored"
    )]
    Unknown {
        /// The character.
        found: char,
    },
    /// Multi-token-prediction layers are not supported.
    #[error("m (multi-token prediction) is not supported: remove it")]
    FurtherToken,
    /// A second embedding or loss.
    #[error("second {letter} in the layout: expected one")]
    Twice {
        /// `E` or `L`.
        letter: char,
    },
    /// The embedding is not at the start.
    #[error("E (embedding) must be the first letter")]
    EmbeddingNotFirst,
    /// The loss is not at the end.
    #[error("L (loss) must be the last letter")]
    LossNotLast,
    /// The embedding is missing.
    #[error("the layout has no embedding: start it with E")]
    NoEmbedding,
    /// The loss is missing.
    #[error("the layout has no loss: end it with L")]
    NoLoss,
    /// There are no layers.
    #[error("the layout has no layers: add a t for each")]
    NoLayers,
    /// A star is not followed by a number.
    #[error("expected a count of 1 or more after *")]
    NoCount,
    /// Nothing before a star can be repeated.
    #[error("nothing to repeat before *: expected a letter, | or )")]
    StrayStar,
    /// A group is not closed.
    #[error("unclosed (")]
    Unclosed,
    /// A group was not opened.
    #[error("unmatched )")]
    Unopened,
    /// A group is not repeated.
    #[error("expected a count after the group, as in (tt|)*2")]
    GroupWithoutCount,
    /// The expanded layout is too long.
    #[error("this count makes the layout longer than {longest} letters")]
    TooLong {
        /// The maximum number of letters of a layout.
        longest: usize,
    },
}

/// A character and its position.
type Letter = (char, usize);

/// Parses a layout string in the format of Megatron-LM, such as `Et*3|(tt|)*2,L`. Returns the layout of each stage, in
/// order.
///
/// `E` is the embedding and must come first, once. Each `t` is a layer. `L` is the loss and must come last, once. `|`
/// begins the next stage. Stages may be empty. `x*n` repeats `x` n times, and `( )*n` repeats the group. Groups may be
/// nested. Commas and spaces are ignored.
///
/// # Errors
///
/// [`SplitError::Syntax`] with the position of the character.
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

/// Expands all counts. Returns the letters and stage separators, each with its position in the text.
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

/// Repeats the letters from `first` on.
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
