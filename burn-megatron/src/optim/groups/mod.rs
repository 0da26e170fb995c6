//! Parameter groups: optimizer settings for the parameters whose paths match a pattern.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[cfg(test)]
mod tests;

pub use crate::glob::GlobError;
use crate::glob::{Glob, listed, nearest};

/// A parameter group: optimizer settings for the parameters whose path matches a pattern.
///
/// If several groups match a parameter, each setting is taken from the last group that sets it. In a recipe:
///
/// ```toml
/// [[groups]]
/// pattern = "embedding.*"
/// weight_decay = 0.0
///
/// [[groups]]
/// pattern = "blocks.*.mlp.**"
/// learning_rate = 0.5
/// ```
///
/// A pattern matches a complete path, such as `blocks.0.mlp.up.weight`. Between two dots, `?` matches one
/// character and `*` any number of characters. `**` as a component matches any number of components, so
/// `**.bias` matches every bias.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ParameterGroup {
    /// The glob pattern that the parameter paths must match.
    pub pattern: String,
    /// The multiplier of the optimizer's weight decay, at least 0. It replaces the default multiplier, which is 0 for
    /// norms and biases. With 1, weight decay is also applied to norms and biases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// The multiplier of the learning rate, at least 0. With 0, the parameters keep their values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// The optimizer of the matching parameters, in a run with Muon. By default Muon updates hidden matrices, and AdamW
    /// updates all other parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<GroupOptimizer>,
}

/// The optimizer of a group in a run with [Muon](super::MuonConfig).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GroupOptimizer {
    /// Muon. The parameters must be matrices or stacks of matrices (three dimensions).
    Muon,
    /// AdamW.
    AdamW,
}

/// The optimizer settings of one parameter after all parameter groups are applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// The multiplier of the weight decay.
    pub decay: f64,
    /// The multiplier of the learning rate.
    pub rate: f64,
    /// The optimizer that a group selects.
    pub optimizer: Option<GroupOptimizer>,
}

/// An invalid parameter group.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GroupError {
    /// An invalid pattern.
    #[error("invalid parameter group `{pattern}`: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The syntax error of the pattern.
        fault: GlobError,
    },
    /// A multiplier is negative, infinite or NaN.
    #[error(
        "invalid parameter group `{pattern}`: {name} = {value}, expected a finite multiplier of at \
         least 0"
    )]
    Multiplier {
        /// The pattern of the group.
        pattern: String,
        /// The name of the setting.
        name: &'static str,
        /// The value of the multiplier.
        value: f64,
    },
    /// A group selects an optimizer, but the optimizer of the run is not Muon.
    #[error(
        "the parameter group `{pattern}` chooses an optimizer, which requires the optimizer muon, but this run has {name}"
    )]
    OneOptimizer {
        /// The pattern of the group.
        pattern: String,
        /// The optimizer of the run.
        name: &'static str,
    },
    /// Groups are set in Muon's AdamW settings, where they have no effect.
    #[error(
        "the parameter group `{pattern}` is in the settings of AdamW for muon, where groups have no effect: move it to \
         the groups of muon, which apply to all parameters"
    )]
    OfAdamW {
        /// The pattern of the group.
        pattern: String,
    },
    /// A group selects Muon for a parameter that several pipeline stages hold.
    #[error(
        "a parameter group chooses muon for {path}, which is tied over the pipeline: choose adamw"
    )]
    Tied {
        /// The path of the parameter.
        path: String,
    },
    /// A group selects Muon for a parameter that is not a matrix.
    #[error(
        "a parameter group chooses muon for {path} of shape {shape:?}: expected a matrix, or a stack of matrices"
    )]
    NotMatrix {
        /// The path of the parameter.
        path: String,
        /// The shape of the parameter.
        shape: Vec<usize>,
    },
    /// A group does not set anything.
    #[error(
        "the parameter group `{pattern}` sets nothing: give weight_decay, learning_rate or both"
    )]
    Nothing {
        /// The pattern of the group.
        pattern: String,
    },
    /// No parameter has a path that matches the pattern.
    #[error("the parameter group `{pattern}` matches no parameter{}", listed(.nearest))]
    Unmatched {
        /// The pattern.
        pattern: String,
        /// The parameter paths that are most similar to the pattern, most similar first.
        nearest: Vec<String>,
    },
}

impl ParameterGroup {
    /// Checks the group, and parses its pattern.
    fn glob(&self) -> Result<Glob, GroupError> {
        let pattern = || self.pattern.clone();
        let multipliers = [
            ("weight_decay", self.weight_decay),
            ("learning_rate", self.learning_rate),
        ];
        if multipliers.iter().all(|(_, value)| value.is_none()) && self.optimizer.is_none() {
            return Err(GroupError::Nothing { pattern: pattern() });
        }
        for (name, value) in multipliers {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
                return Err(GroupError::Multiplier {
                    pattern: pattern(),
                    name,
                    value,
                });
            }
        }
        Glob::parse(&self.pattern).map_err(|fault| GroupError::Pattern {
            pattern: pattern(),
            fault,
        })
    }
}

/// Checks the groups without comparing them with parameters.
///
/// # Errors
///
/// [`GroupError`] for the first invalid group, but never [`GroupError::Unmatched`].
pub fn check(groups: &[ParameterGroup]) -> Result<(), GroupError> {
    groups.iter().try_for_each(|group| group.glob().map(drop))
}

/// Returns the multipliers of each parameter, in the order of `parameters`. Each element of `parameters` is the path of
/// a parameter, and whether weight decay applies to the parameter by default
/// ([`ParameterEntry::decay`](crate::nn::ParameterEntry::decay)).
///
/// If no group matches, the multiplier of the learning rate is 1, and the multiplier of the weight decay is 1 or 0. The
/// multipliers depend only on the path of the parameter, so they are equal on all ranks that replicate the parameter. A
/// pattern that matches none of `parameters` is not an error, because `parameters` may contain only one pipeline stage:
/// see [`unmatched`].
///
/// ```
/// use burn_megatron::optim::ParameterGroup;
/// use burn_megatron::optim::groups::resolve;
///
/// let group = ParameterGroup {
///     pattern: "blocks.*.mlp.**".into(),
///     learning_rate: Some(0.5),
///     ..ParameterGroup::default()
/// };
/// let multipliers = resolve(&[group], [("blocks.0.mlp.up.weight", true), ("norm.weight", false)])?;
/// assert_eq!((multipliers[0].rate, multipliers[0].decay), (0.5, 1.0));
/// assert_eq!((multipliers[1].rate, multipliers[1].decay), (1.0, 0.0));
/// # Ok::<(), burn_megatron::optim::GroupError>(())
/// ```
///
/// # Errors
///
/// The errors of [`check`].
pub fn resolve<'a>(
    groups: &[ParameterGroup],
    parameters: impl IntoIterator<Item = (&'a str, bool)>,
) -> Result<Vec<Multipliers>, GroupError> {
    let globs = globs(groups)?;
    let resolved = parameters.into_iter().map(|(path, decays)| {
        let mut multipliers = Multipliers {
            decay: f64::from(u8::from(decays)),
            rate: 1.0,
            optimizer: None,
        };
        for (group, _) in groups.iter().zip(&globs).filter(|(_, g)| g.matches(path)) {
            multipliers.decay = group.weight_decay.unwrap_or(multipliers.decay);
            multipliers.rate = group.learning_rate.unwrap_or(multipliers.rate);
            multipliers.optimizer = group.optimizer.or(multipliers.optimizer);
        }
        multipliers
    });
    Ok(resolved.collect())
}

/// Returns the indices of the groups that match none of `paths`, in ascending order.
///
/// With pipeline parallelism, a group is an error only if it matches no parameter on any rank: see [`unmatched_error`].
///
/// # Errors
///
/// The errors of [`check`].
pub fn unmatched<'a>(
    groups: &[ParameterGroup],
    paths: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<usize>, GroupError> {
    let mut remaining: Vec<_> = globs(groups)?.into_iter().enumerate().collect();
    for path in paths {
        remaining.retain(|(_, glob)| !glob.matches(path));
    }
    Ok(remaining.into_iter().map(|(index, _)| index).collect())
}

/// Returns the error for a group that matches no parameter of the complete model. The error lists the paths in `paths`
/// that are most similar to the pattern. If the group itself is invalid, returns the error of [`check`].
pub fn unmatched_error<'a>(
    group: &ParameterGroup,
    paths: impl IntoIterator<Item = &'a str>,
) -> GroupError {
    let glob = match group.glob() {
        Ok(glob) => glob,
        Err(error) => return error,
    };
    GroupError::Unmatched {
        pattern: group.pattern.clone(),
        nearest: nearest(&glob, paths),
    }
}

fn globs(groups: &[ParameterGroup]) -> Result<Vec<Glob>, GroupError> {
    groups.iter().map(ParameterGroup::glob).collect()
}
