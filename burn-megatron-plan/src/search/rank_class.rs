//! The ranks of a pipeline, alike ones together.

use super::super::ModelProfile;
use super::super::fit::RankElements;
use super::super::memory::MemoryByKind;
use super::super::time::LayerSeconds;
use super::visit::RankStages;

/// The ranks of a pipeline that hold and compute the same: few, as stages in the middle are alike.
pub(super) struct RankClass {
    pub elements: RankElements,
    pub seconds: LayerSeconds,
    /// Their ranks.
    pub ranks: Vec<usize>,
    /// The memory that the rank with the highest need holds in addition to its state.
    pub working: MemoryByKind,
    /// The most bytes of activations of one of them on the host.
    pub on_host: u64,
}

impl RankClass {
    /// The classes of the ranks with these stages, which take so long; nothing is known of what they hold beside their
    /// state.
    pub fn of_ranks(
        profile: &ModelProfile,
        ranks: &[RankStages<'_>],
        seconds: &[LayerSeconds],
    ) -> Vec<Self> {
        let mut classes: Vec<Self> = vec![];
        for (rank, (own, seconds)) in ranks.iter().zip(seconds).enumerate() {
            let own: Vec<_> = own.iter().map(|(_, stage)| *stage).collect();
            let elements = RankElements::new(profile, own);
            let same = |class: &&mut Self| class.elements == elements && class.seconds == *seconds;
            match classes.iter_mut().find(same) {
                Some(class) => class.ranks.push(rank),
                None => classes.push(Self {
                    elements,
                    seconds: *seconds,
                    ranks: vec![rank],
                    working: MemoryByKind::default(),
                    on_host: 0,
                }),
            }
        }
        classes
    }
}
