//! The assignment of layers to pipeline stages: an even split, a split with other numbers of layers on the first and
//! the last stage, or a layout string. See [`LayerSplit`].

mod layout;

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::split::multiples_around;

pub use layout::{LayoutSyntaxError, parse_layout};

/// The part of a model that is on one pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageLayout {
    /// Whether this stage has the embedding.
    pub embedding: bool,
    /// The layers of this stage, as indices into the layers of the complete model. The range may be empty.
    pub layers: Range<usize>,
    /// Whether this stage has the output layer and the loss.
    pub loss: bool,
}

/// The distribution of the layers of a model over pipeline stages.
///
/// The first stage always has the embedding, and the last stage always has the loss.
///
/// ```text
/// split = "even"
/// split = { ends = { first = 1, last = 1 } }
/// split = { layout = "Et*3|(tt|)*2,L" }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LayerSplit {
    /// Each stage has the same number of layers.
    #[default]
    Even,
    /// The first and the last stage have the given numbers of layers. The remaining layers are distributed evenly over
    /// the other stages. If the number for the first or the last stage is `None`, that stage counts as one of the other
    /// stages.
    Ends {
        /// The number of layers of the first stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        first: Option<usize>,
        /// The number of layers of the last stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        last: Option<usize>,
    },
    /// The layers are assigned by a [layout string](parse_layout) in the format of Megatron-LM, such as
    /// `Et*3|(tt|)*2,L`.
    Layout(String),
}

/// The reason why the layers of a model cannot be distributed over pipeline stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// The number of layers, stages or ranks is 0.
    #[error("invalid number of {what} 0: a pipeline needs at least 1")]
    Zero {
        /// The name of the number that is 0.
        what: &'static str,
    },
    /// The number of layers is not divisible by the number of stages.
    #[error(
        "{layers} layers are not divisible by {stages} stages: use {fits}, or set the numbers of \
         layers of the first and the last stage"
    )]
    Uneven {
        /// The number of layers of the model.
        layers: usize,
        /// The number of stages of the pipeline.
        stages: usize,
        /// The nearest valid numbers of layers and stages.
        fits: String,
    },
    /// The given numbers of layers of the first and the last stage exceed the layers of the model, or there are too few
    /// stages.
    #[error(
        "{ends} layers on the first and the last stage do not fit {layers} layers over {stages} \
         stages: use {fits}"
    )]
    Ends {
        /// The sum of the given numbers of layers of the first and the last stage.
        ends: usize,
        /// The number of layers of the model.
        layers: usize,
        /// The number of stages of the pipeline.
        stages: usize,
        /// The valid values.
        fits: String,
    },
    /// The remaining layers cannot be distributed evenly over the stages without a given number of layers.
    #[error(
        "{ends} of {layers} layers on the first and the last stage leave {rest} for {between} \
         other stages, expected a positive multiple of {between}: use {fits} layers at the ends"
    )]
    Between {
        /// The sum of the given numbers of layers of the first and the last stage.
        ends: usize,
        /// The number of layers of the model.
        layers: usize,
        /// The number of layers that remain for the other stages.
        rest: usize,
        /// The number of stages without a given number of layers.
        between: usize,
        /// The valid sums of the numbers of layers of the first and the last stage.
        fits: String,
    },
    /// The layout string has a syntax error.
    #[error("{fault}\n  {text}\n  {:at$}^", "")]
    Syntax {
        /// The layout string.
        text: String,
        /// The position of the invalid character, counted from 0.
        at: usize,
        /// The syntax error at this position.
        fault: LayoutSyntaxError,
    },
    /// The layout string and the model have different numbers of layers.
    #[error("the layout \"{text}\" has {named} layers (t), the model has {layers}")]
    LayoutLayers {
        /// The layout string.
        text: String,
        /// The number of layers of the layout string.
        named: usize,
        /// The number of layers of the model.
        layers: usize,
    },
    /// The layout string and the pipeline have different numbers of stages.
    #[error("the layout \"{text}\" has {named} stages, the pipeline has {stages}")]
    LayoutStages {
        /// The layout string.
        text: String,
        /// The number of stages of the layout string.
        named: usize,
        /// The number of stages of the pipeline.
        stages: usize,
    },
    /// The number of stages is not divisible by the number of ranks.
    #[error("{stages} stages are not divisible by {ranks} ranks: use {fits}")]
    Ranks {
        /// The number of stages of the pipeline.
        stages: usize,
        /// The number of ranks of the pipeline.
        ranks: usize,
        /// The valid numbers of stages and ranks.
        fits: String,
    },
}

impl LayerSplit {
    /// Distributes `layers` layers over `stages` pipeline stages. Returns the layout of each stage.
    ///
    /// ```
    /// use burn_megatron_comm::mesh::stages::LayerSplit;
    ///
    /// // The first stage also has the embedding, and the last stage the loss.
    /// let split = LayerSplit::Ends { first: Some(1), last: Some(1) };
    /// let layers: Vec<_> = split.stages(6, 4)?.into_iter().map(|stage| stage.layers).collect();
    /// assert_eq!(layers, [0..1, 1..3, 3..5, 5..6]);
    /// assert!(LayerSplit::Even.stages(6, 4).is_err());
    /// # Ok::<(), burn_megatron_comm::mesh::stages::SplitError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SplitError`], with the valid numbers or with the position in the layout string.
    pub fn stages(&self, layers: usize, stages: usize) -> Result<Vec<StageLayout>, SplitError> {
        for (what, count) in [("layers", layers), ("stages", stages)] {
            if count == 0 {
                return Err(SplitError::Zero { what });
            }
        }
        match self {
            LayerSplit::Even => even(layers, stages),
            LayerSplit::Ends { first, last } => ends(layers, stages, *first, *last),
            LayerSplit::Layout(text) => checked_layout(text, layers, stages),
        }
    }
}

/// Returns the number of pipeline stages per rank (`v` in the literature).
///
/// # Errors
///
/// [`SplitError::Ranks`] if `stages` is not divisible by `ranks`. [`SplitError::Zero`] if one of the numbers is 0.
pub fn virtual_stages(stages: usize, ranks: usize) -> Result<usize, SplitError> {
    for (what, count) in [("stages", stages), ("ranks", ranks)] {
        if count == 0 {
            return Err(SplitError::Zero { what });
        }
    }
    if !stages.is_multiple_of(ranks) {
        let fits = format!(
            "{} stages, or {} ranks",
            multiples_around(stages, ranks),
            divisors_around(stages, ranks)
        );
        return Err(SplitError::Ranks {
            stages,
            ranks,
            fits,
        });
    }
    Ok(stages / ranks)
}

fn even(layers: usize, stages: usize) -> Result<Vec<StageLayout>, SplitError> {
    if !layers.is_multiple_of(stages) {
        let fits = format!(
            "{} layers, or {} stages",
            multiples_around(layers, stages),
            divisors_around(layers, stages)
        );
        return Err(SplitError::Uneven {
            layers,
            stages,
            fits,
        });
    }
    Ok(stage_layouts(&vec![layers / stages; stages]))
}

fn ends(
    layers: usize,
    stages: usize,
    first: Option<usize>,
    last: Option<usize>,
) -> Result<Vec<StageLayout>, SplitError> {
    let named = usize::from(first.is_some()) + usize::from(last.is_some());
    if named == 0 {
        return even(layers, stages);
    }
    let ends = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
    let misfit = |fits: String| SplitError::Ends {
        ends,
        layers,
        stages,
        fits,
    };
    let between = stages
        .checked_sub(named)
        .ok_or_else(|| misfit("2 stages or more".into()))?;
    let rest = layers
        .checked_sub(ends)
        .ok_or_else(|| misfit(most_at_ends(layers, between)))?;
    if between == 0 && rest > 0 {
        return Err(misfit(format!("{layers} layers there, or more stages")));
    }
    if between > 0 && (rest == 0 || !rest.is_multiple_of(between)) {
        return Err(SplitError::Between {
            ends,
            layers,
            rest,
            between,
            fits: ends_around(layers, rest, between)
                .ok_or_else(|| misfit(format!("at most {} stages", rest.saturating_add(named))))?,
        });
    }
    let share = rest.checked_div(between).unwrap_or(0);
    let mut counts = vec![share; between];
    if let Some(first) = first {
        counts.insert(0, first);
    }
    counts.extend(last);
    Ok(stage_layouts(&counts))
}

fn checked_layout(
    text: &str,
    layers: usize,
    stages: usize,
) -> Result<Vec<StageLayout>, SplitError> {
    let layout = parse_layout(text)?;
    let named = layout.last().map_or(0, |stage| stage.layers.end);
    if named != layers {
        return Err(SplitError::LayoutLayers {
            text: text.into(),
            named,
            layers,
        });
    }
    if layout.len() != stages {
        return Err(SplitError::LayoutStages {
            text: text.into(),
            named: layout.len(),
            stages,
        });
    }
    Ok(layout)
}

/// Returns the layouts of stages with these numbers of layers, in order.
fn stage_layouts(counts: &[usize]) -> Vec<StageLayout> {
    let mut end = 0;
    let stage = |(i, count): (usize, &usize)| {
        let start = end;
        end += count;
        StageLayout {
            embedding: i == 0,
            layers: start..end,
            loss: i + 1 == counts.len(),
        }
    };
    counts.iter().enumerate().map(stage).collect()
}

/// Lists the divisors of `number` nearest to `divisor`, which is not a divisor: `2 or 5`.
fn divisors_around(number: usize, divisor: usize) -> String {
    let divides = |trial: &usize| number.is_multiple_of(*trial);
    let below = (1..divisor.min(number + 1)).rev().find(divides);
    let above = (divisor..=number).find(divides);
    let both: Vec<_> = below.iter().chain(&above).map(usize::to_string).collect();
    both.join(" or ")
}

/// Describes the maximum number of layers on the first and the last stage that leaves one layer for each other stage.
fn most_at_ends(layers: usize, between: usize) -> String {
    match (between, layers.checked_sub(between)) {
        (0, _) => format!("{layers} layers there"),
        (_, Some(most)) if most > 0 => format!("at most {most} layers there"),
        _ => format!("more than {between} layers"),
    }
}

/// Lists the numbers of layers on the first and the last stage that leave a multiple of the number of other stages:
/// `2 or 4`.
fn ends_around(layers: usize, rest: usize, between: usize) -> Option<String> {
    let below = rest / between * between;
    let above = below.checked_add(between).filter(|above| *above <= layers);
    let kept = [above, Some(below).filter(|below| *below > 0)];
    let ends: Vec<_> = kept
        .into_iter()
        .flatten()
        .map(|rest| (layers - rest).to_string())
        .collect();
    (!ends.is_empty()).then(|| ends.join(" or "))
}

#[cfg(test)]
mod tests;
