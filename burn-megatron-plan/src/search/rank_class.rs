//! Groups the identical ranks of a pipeline.

use super::super::ModelProfile;
use super::super::fit::RankElements;
use super::super::memory::MemoryByKind;
use super::super::time::LayerSeconds;
use super::visit::RankStages;

/// Pipeline ranks that hold the same layers and run the same computation. There are few classes, because the middle
/// stages of a pipeline are identical.
pub(super) struct RankClass {
    pub elements: RankElements,
    pub seconds: LayerSeconds,
    /// The ranks of the class.
    pub ranks: Vec<usize>,
    /// The memory in addition to the training state, on the rank of the class that needs the most memory.
    pub working: MemoryByKind,
    /// The peak number of bytes of activations on the host, on the rank of the class with the largest number.
    pub on_host: u64,
}

impl RankClass {
    /// Groups the ranks with these stages and times into classes. The memory in addition to the training state is not
    /// computed yet.
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
