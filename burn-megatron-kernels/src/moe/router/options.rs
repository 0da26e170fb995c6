//! Options of the router, and their checks.

use super::NAME;
use crate::KernelError;
use crate::error::{check_option, check_shape};
use crate::moe::permutation::sort::check_experts;
use crate::moe::score::ScoreFunction;

/// Options of the router. They determine the experts that are chosen for a token, and the weights of these experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterOptions {
    /// The number of experts per token, `k`.
    pub top_k: usize,
    /// The function that computes the scores of experts from the logits.
    pub score: ScoreFunction,
    /// Whether the weights are divided by their sum over the chosen experts. [`ScoreFunction::Softmax`] and
    /// [`ScoreFunction::PreSoftmax`] ignore this option. The default is true if `top_k` is larger than 1.
    pub normalized: Option<bool>,
    /// The factor that multiplies the weights.
    pub scaling_factor: f64,
    /// Groups of experts for group-limited routing, in which each token chooses experts from only some groups. `None`
    /// disables group-limited routing.
    pub groups: Option<ExpertGroups>,
}

/// Groups of experts for group-limited routing. With `E` experts and `G` groups, group `i` contains the experts
/// `i * E / G..(i + 1) * E / G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups, `G`.
    pub groups: usize,
    /// The number of groups from which a token may choose experts, `g`. For each token, the groups with the largest
    /// scores are used.
    pub chosen: usize,
    /// The method that computes the score of a group.
    pub score: GroupScore,
}

/// The method that computes the score of a group from the scores of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest score of the experts in the group, as in DeepSeek-V2.
    Max,
    /// The sum of the largest scores of the experts in the group. The value is the number of scores that are added. It
    /// is 2 in DeepSeek-V3 and `k / g` in Megatron Core.
    SumOf(usize),
}

impl GroupScore {
    /// Returns the number of experts whose scores are added to the score of a group.
    pub(super) fn terms(self) -> usize {
        match self {
            Self::Max => 1,
            Self::SumOf(terms) => terms,
        }
    }
}

impl RouterOptions {
    /// Creates options for a router that chooses `top_k` experts with [`ScoreFunction::Softmax`].
    pub fn new(top_k: usize) -> Self {
        Self {
            top_k,
            score: ScoreFunction::Softmax,
            normalized: None,
            scaling_factor: 1.0,
            groups: None,
        }
    }

    /// Returns whether the weights of the chosen experts are divided by their sum.
    pub(super) fn normalizes(&self) -> bool {
        self.score.is_softmax() || self.normalized.unwrap_or(self.top_k > 1)
    }

    /// Checks the options for a model with the given number of experts.
    ///
    /// # Errors
    ///
    /// Returns an error if
    /// - `top_k` is 0 or exceeds the number of experts that a token may use,
    /// - the number of groups is not a divisor of the number of experts, or [`ExpertGroups::chosen`] exceeds the number
    ///   of groups,
    /// - [`GroupScore::SumOf`] is 0, or exceeds the number of experts per group,
    /// - the scaling factor is not finite.
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
