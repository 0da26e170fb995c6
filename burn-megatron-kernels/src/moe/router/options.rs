//! Options of the router, and their checks.

use super::NAME;
use crate::KernelError;
use crate::error::{check_option, check_shape};
use crate::moe::permutation::sort::check_experts;
use crate::moe::score::ScoreFunction;

/// Options for the choice of a token's experts, and their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterOptions {
    /// The number of experts per token, `k`.
    pub top_k: usize,
    /// The function from logits to scores.
    pub score: ScoreFunction,
    /// Whether weights other than a softmax are divided by their sum over the chosen experts. The
    /// default is true if a token chooses several experts.
    pub normalized: Option<bool>,
    /// The factor of the weights.
    pub scaling_factor: f64,
    /// Limits a token to the experts of some groups.
    pub groups: Option<ExpertGroups>,
}

/// Groups of experts: group `i` of `G` has the experts `i E / G` to `(i + 1) E / G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups, `G`.
    pub groups: usize,
    /// The number of groups that a token may use, `g`: the groups with the largest scores.
    pub chosen: usize,
    /// The score of a group.
    pub score: GroupScore,
}

/// The score of a group, computed from the scores of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest score, as in DeepSeek-V2.
    Max,
    /// The sum of this number of largest scores: 2 in DeepSeek-V3, `k / g` in Megatron Core.
    SumOf(usize),
}

impl GroupScore {
    /// Returns the number of experts whose scores are added.
    pub(super) fn terms(self) -> usize {
        match self {
            Self::Max => 1,
            Self::SumOf(terms) => terms,
        }
    }
}

impl RouterOptions {
    /// Creates options that choose `k` experts by a softmax over their logits.
    pub fn new(top_k: usize) -> Self {
        Self {
            top_k,
            score: ScoreFunction::Softmax,
            normalized: None,
            scaling_factor: 1.0,
            groups: None,
        }
    }

    /// Returns whether the weights of the chosen experts are divided by a sum.
    pub(super) fn normalizes(&self) -> bool {
        self.score.is_softmax() || self.normalized.unwrap_or(self.top_k > 1)
    }

    /// Checks the options for a number of experts.
    ///
    /// # Errors
    ///
    /// Returns an error if
    /// - a token cannot choose `top_k` experts,
    /// - the groups do not divide the experts, or more groups are chosen than there are,
    /// - the score of a group takes no experts, or more experts than a group has,
    /// - the factor is not finite.
    pub fn check(&self, experts: usize) -> Result<(), KernelError> {
        check_experts(NAME, experts)?;
        let top_k = self.top_k;
        check_shape(NAME, (1..=experts).contains(&top_k), || {
            format!("top_k = {top_k} of {experts} experts: expected 1 to {experts}")
        })?;
        let (name, factor) = ("scaling_factor", self.scaling_factor);
        check_option(NAME, factor.is_finite(), name, factor, "a finite number")?;
        self.groups
            .map_or(Ok(()), |groups| groups.check(experts, top_k))
    }
}

impl ExpertGroups {
    fn check(&self, experts: usize, top_k: usize) -> Result<(), KernelError> {
        let Self { groups, chosen, .. } = *self;
        let divides = groups > 0 && experts.is_multiple_of(groups);
        check_shape(NAME, divides, || {
            format!("{groups} groups of {experts} experts: expected a divisor of {experts}")
        })?;
        check_shape(NAME, (1..=groups).contains(&chosen), || {
            format!("{chosen} chosen groups of {groups}: expected 1 to {groups}")
        })?;
        let size = experts / groups;
        let most = chosen * size;
        check_shape(NAME, top_k <= most, || {
            format!(
                "top_k = {top_k} with {chosen} chosen groups of {size} experts: expected at most {most}"
            )
        })?;
        let terms = self.score.terms();
        check_shape(NAME, (1..=size).contains(&terms), || {
            format!(
                "a score of the {terms} best of a group of {size} experts: expected 1 to {size}"
            )
        })
    }
}
