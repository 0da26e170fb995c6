//! Layout strings, as in `Et*3|(tt|)*2,L`.

use super::{SplitError, StageLayout};

/// The most letters of a layout, all counts multiplied out.
const LONGEST: usize = 1 << 16;

/// What is wrong at one place of a layout string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutFault {
    /// A character has no meaning.
    #[error(
        "the layout has a '{found}' here: use E (embedding), t (layer), L (loss), | (next stage), \
         ( ) and *, with commas where they help the eye"
    )]
    Unknown {
        /// The character.
        found: char,
    },
    /// Layers that predict further tokens are asked for.
    #[error("m (a layer that predicts a further token) is not built: leave it out")]
    FurtherToken,
    /// The embedding or the loss is named again.
    #[error("the layout has a second {letter} here: name it once")]
    Twice {
        /// `E` or `L`.
        letter: char,
    },
    /// The embedding is not at the start.
    #[error("E (embedding) has to be the first letter")]
    EmbeddingNotFirst,
    /// The loss is not at the end.
    #[error("L (loss) has to be the last letter, and here something follows it")]
    LossNotLast,
    /// The embedding is missing.
    #[error("the layout has no embedding: begin it with E")]
    NoEmbedding,
    /// The loss is missing.
    #[error("the layout has no loss: end it with L")]
    NoLoss,
    /// There are no layers.
    #[error("the layout has no layers: write a t for each")]
    NoLayers,
    /// A star is not followed by a number.
    #[error("a count of 1 or more has to follow the *")]
    NoCount,
    /// A star follows nothing that can be repeated.
    #[error("there is nothing before the * to repeat: it follows a letter, a | or a )")]
    StrayStar,
    /// A group is not closed.
    #[error("this ( has no )")]
    Unclosed,
    /// A group was not opened.
    #[error("this ) has no (")]
    Unopened,
    /// A group is not repeated.
    #[error("a count has to follow the group, as in (tt|)*2")]
    GroupWithoutCount,
    /// Counts multiply out to too much.
    #[error("with this count the layout is longer than {longest} letters")]
    TooLong {
        /// The most letters of a layout.
        longest: usize,
    },
}

/// A character, and where it stands.
type Letter = (char, usize);

/// Reads a layout string of the form that Megatron-LM uses, `Et*3|(tt|)*2,L`: what each stage holds,
/// in the order of the stages.
///
/// `E` is the embedding, once and first; each `t` is a layer; `L` is the loss, once and last; `|`
/// begins the next stage, and stages may be empty. `x*n` stands for n times `x`, and `( )*n` for n
/// times what is in the parentheses, which may hold others. Commas and spaces mean nothing.
///
/// # Errors
///
/// [`SplitError::Syntax`] points at the character.
pub fn parse_layout(text: &str) -> Result<Vec<StageLayout>, SplitError> {
    let error = |(fault, at)| SplitError::Syntax {
        text: text.into(),
        at,
        fault,
    };
    let end = text.chars().count();
    let letters = written_out(text, end).map_err(error)?;
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

/// The letters and stage marks with all counts multiplied out, each with its place in the text.
fn written_out(text: &str, end: usize) -> Result<Vec<Letter>, (LayoutFault, usize)> {
    let skipped = |letter: char| letter == ',' || letter.is_whitespace();
    let mut rest = (0..end)
        .zip(text.chars())
        .filter(|(_, letter)| !skipped(*letter))
        .peekable();
    let mut letters = vec![];
    // Where the open groups begin, in the letters and in the text.
    let mut open = vec![];
    while let Some((at, letter)) = rest.next() {
        let repeated = match letter {
            '(' => {
                open.push((letters.len(), at));
                continue;
            }
            ')' => open.pop().ok_or((LayoutFault::Unopened, at))?.0,
            'E' | 't' | 'L' | '|' => {
                letters.push((letter, at));
                letters.len() - 1
            }
            'm' => return Err((LayoutFault::FurtherToken, at)),
            '*' => return Err((LayoutFault::StrayStar, at)),
            found => return Err((LayoutFault::Unknown { found }, at)),
        };
        let Some((star, _)) = rest.next_if(|(_, letter)| *letter == '*') else {
            if letter == ')' {
                return Err((LayoutFault::GroupWithoutCount, at));
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
        Some((_, at)) => Err((LayoutFault::Unclosed, at)),
        None => Ok(letters),
    }
}

/// Repeats the letters from `first` on.
fn repeat(letters: &mut Vec<Letter>, first: usize, digits: &str) -> Result<(), LayoutFault> {
    if digits.trim_start_matches('0').is_empty() {
        return Err(LayoutFault::NoCount);
    }
    let repeated = letters.split_off(first);
    // A count that no `usize` holds is too long as well, but for a group of nothing.
    let count = digits.parse().unwrap_or(usize::MAX);
    let length = repeated.len().saturating_mul(count);
    if letters.len().saturating_add(length) > LONGEST {
        return Err(LayoutFault::TooLong { longest: LONGEST });
    }
    letters.extend(repeated.iter().cycle().take(length));
    Ok(())
}

/// Checks that E comes first, L last, and layers between.
fn check(letters: &[Letter], end: usize) -> Result<(), (LayoutFault, usize)> {
    let places = |wanted: char| {
        let is = move |(_, (letter, _)): &(usize, &Letter)| *letter == wanted;
        letters.iter().enumerate().filter(is)
    };
    for letter in ['E', 'L'] {
        if let Some((_, (_, at))) = places(letter).nth(1) {
            return Err((LayoutFault::Twice { letter }, *at));
        }
    }
    match places('E').next() {
        None => return Err((LayoutFault::NoEmbedding, 0)),
        Some((0, _)) => {}
        Some((_, (_, at))) => return Err((LayoutFault::EmbeddingNotFirst, *at)),
    }
    match places('L').next() {
        None => return Err((LayoutFault::NoLoss, end)),
        Some((i, _)) if i + 1 == letters.len() => {}
        Some((_, (_, at))) => return Err((LayoutFault::LossNotLast, *at)),
    }
    match places('t').next() {
        Some(_) => Ok(()),
        None => Err((LayoutFault::NoLayers, end)),
    }
}
