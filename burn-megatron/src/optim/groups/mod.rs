//! Settings of the optimizer for some of the parameters, which a pattern over their paths names.

use serde::{Deserialize, Serialize};

#[cfg(test)]
mod tests;

pub use crate::glob::GlobFault;
use crate::glob::{Glob, listed, nearest};

/// Multipliers for the parameters whose path a pattern fits.
///
/// In a recipe, where later groups override earlier ones, setting by setting:
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
/// A pattern fits a whole path, as in `blocks.0.mlp.up.weight`. Between two dots, `?` is one
/// character and `*` any number of them; `**` alone is any number of components. So `**.bias` is
/// every bias.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterGroup {
    /// Which parameters.
    pub pattern: String,
    /// Times the weight decay of the optimizer, at least 0. It takes the place of the default, so 1
    /// gives a norm or a bias the decay of a weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Times the learning rate of the step, at least 0; 0 keeps the parameters as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
}

/// What the optimizer's settings are multiplied by for one parameter, without unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Times the weight decay.
    pub decay: f64,
    /// Times the learning rate.
    pub rate: f64,
}

/// Groups that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GroupError {
    /// A pattern that means nothing.
    #[error("the parameter group `{pattern}`: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        fault: GlobFault,
    },
    /// A multiplier that is negative, infinite or not a number.
    #[error(
        "the parameter group `{pattern}`: {name} = {value} multiplies nothing; it must be finite \
         and at least 0"
    )]
    Multiplier {
        /// The pattern of the group.
        pattern: String,
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// A group without a multiplier.
    #[error(
        "the parameter group `{pattern}` sets nothing: give weight_decay, learning_rate or both"
    )]
    Nothing {
        /// The pattern of the group.
        pattern: String,
    },
    /// No parameter has a path that the pattern fits.
    #[error("the parameter group `{pattern}` fits no parameter{}", listed(.nearest))]
    Unmatched {
        /// The pattern.
        pattern: String,
        /// The paths that it takes the fewest changes to fit, the nearest first.
        nearest: Vec<String>,
    },
}

impl ParameterGroup {
    /// Whether the group can be, and its pattern.
    fn glob(&self) -> Result<Glob, GroupError> {
        let pattern = || self.pattern.clone();
        let multipliers = [
            ("weight_decay", self.weight_decay),
            ("learning_rate", self.learning_rate),
        ];
        if multipliers.iter().all(|(_, value)| value.is_none()) {
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

/// Finds the first group that cannot be; no parameter is needed for that.
///
/// # Errors
///
/// [`GroupError`], but not [`GroupError::Unmatched`].
pub fn check(groups: &[ParameterGroup]) -> Result<(), GroupError> {
    groups.iter().try_for_each(|group| group.glob().map(drop))
}

/// The multipliers of each of `parameters`, in their order: of each its path, and whether it decays
/// where no group says otherwise (as [`ParameterEntry`](crate::nn::ParameterEntry) knows).
///
/// Without a group they are 1 for the rate, and 1 or 0 for the decay. They depend on the path alone,
/// so ranks that share a parameter agree. A pattern that fits nothing here is no error, as the
/// parameters may be those of one stage of a pipeline: see [`unmatched`].
///
/// # Errors
///
/// See [`check`].
pub fn resolve<'a>(
    groups: &[ParameterGroup],
    parameters: impl IntoIterator<Item = (&'a str, bool)>,
) -> Result<Vec<Multipliers>, GroupError> {
    let globs = globs(groups)?;
    let multipliers = parameters.into_iter().map(|(path, decays)| {
        let mut multipliers = Multipliers {
            decay: f64::from(u8::from(decays)),
            rate: 1.0,
        };
        for (group, _) in groups.iter().zip(&globs).filter(|(_, g)| g.fits(path)) {
            multipliers.decay = group.weight_decay.unwrap_or(multipliers.decay);
            multipliers.rate = group.learning_rate.unwrap_or(multipliers.rate);
        }
        multipliers
    });
    Ok(multipliers.collect())
}

/// The places in `groups` of those that fit none of `paths`, in ascending order.
///
/// On a pipeline, a group is a mistake where it is among the unmatched of *every* rank:
/// [`unmatched_error`] says so to the user.
///
/// # Errors
///
/// See [`check`].
pub fn unmatched<'a>(
    groups: &[ParameterGroup],
    paths: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<usize>, GroupError> {
    let mut left: Vec<_> = globs(groups)?.into_iter().enumerate().collect();
    for path in paths {
        left.retain(|(_, glob)| !glob.fits(path));
    }
    Ok(left.into_iter().map(|(place, _)| place).collect())
}

/// The error of a group that fits no parameter of the whole model, with the nearest of the paths
/// that are known here. It is [`check`]'s where the group cannot be in the first place.
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
