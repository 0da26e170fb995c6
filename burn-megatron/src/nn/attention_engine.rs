//! Selection of the engine of fused attention, which is the implementation of its kernels. All ranks of the tensor axis
//! select the same engine.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron_kernels::attention::{
    AttentionEngine, EngineKind, Heads, SelectedEngine, Window, select_engine,
};

use super::BuildError;
use crate::collective::Comm;
use crate::comm::{Communicator, ReduceOp};
use crate::kernel_selection::{KernelChoiceError, KernelSelection};

/// The engines selected so far, one for each kind of heads in the model.
#[derive(Debug, Default)]
pub(super) struct AttentionEngines(Vec<(HeadKind, Arc<dyn AttentionEngine>)>);

/// The heads of a tensor rank, the number of features of a value, and the sliding window.
pub(super) type HeadKind = (Heads, usize, Option<Window>);

impl AttentionEngines {
    /// Returns the engine for these heads. The first call selects the engine and records it in `kernels`. If `ranks` is
    /// given and the ranks could select different engines, the call is collective over `ranks`.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if the requested engine cannot be used. [`BuildError::Comm`] if the collective fails.
    pub fn select(
        &mut self,
        kernels: &mut KernelSelection,
        ranks: Option<&Comm>,
        (device, dtype): (&Device, DType),
        heads: HeadKind,
    ) -> Result<Arc<dyn AttentionEngine>, BuildError> {
        if let Some((_, engine)) = self.0.iter().find(|(of, _)| *of == heads) {
            return Ok(Arc::clone(engine));
        }
        let (of_rank, value_width, window) = heads;
        let device = device.clone().inner();
        let select = |kinds: &[EngineKind]| {
            select_engine(kinds, &device, dtype, (of_rank, value_width), window).map_err(|reason| {
                let engine = kinds[0];
                BuildError::from(KernelChoiceError::NoEngine { engine, reason })
            })
        };
        let (selected, reason) = match kernels.attention_choice().engine() {
            Some(engine) => (select(&[engine])?, "requested".into()),
            None => {
                // The CPU, and f32 and f64 on every device, have only one engine.
                let may_differ = device != Device::flex() && dtype.size() == 2;
                let selected = match ranks.filter(|ranks| may_differ && ranks.size() > 1) {
                    Some(ranks) => agree(&**ranks, select)?,
                    None => select(&EngineKind::ALL)?,
                };
                let reason = reason(&selected, dtype);
                (selected, reason)
            }
        };
        kernels.add_attention_engine(selected.kind, reason);
        self.0.push((heads, Arc::clone(&selected.engine)));
        Ok(selected.engine)
    }
}

fn reason(selected: &SelectedEngine, dtype: DType) -> String {
    if selected.skipped.is_empty() {
        format!("the device has tensor cores for {dtype:?}")
    } else {
        selected.skipped.join("; ")
    }
}

/// Returns the first engine that all ranks can use.
fn agree(
    ranks: &dyn Communicator,
    select: impl Fn(&[EngineKind]) -> Result<SelectedEngine, BuildError>,
) -> Result<SelectedEngine, BuildError> {
    let (mut first, mut skipped) = (0, vec![]);
    loop {
        let mut selected = select(&EngineKind::ALL[first..])?;
        skipped.append(&mut selected.skipped);
        let own = EngineKind::ALL
            .iter()
            .position(|kind| *kind == selected.kind);
        let own = own.unwrap_or(first) as i64;
        let last = ranks.all_reduce_scalar(own, ReduceOp::Max)?;
        if last == first as i64 {
            selected.skipped = skipped;
            return Ok(selected);
        }
        if own < last {
            let other = "another rank of the tensor axis cannot use it";
            skipped.push(format!("{}: {other}", selected.kind));
        }
        first = last as usize;
    }
}

#[cfg(test)]
mod tests {
    use burn_megatron_kernels::attention::Portable;

    use super::*;
    use crate::comm::{Rank, World};

    /// Rank 1 cannot use the first engine.
    #[test]
    fn all_ranks_use_the_engine_that_each_can_use() {
        let selected = |refusing: &[usize]| {
            let run = |rank: Rank| {
                let select = |kinds: &[EngineKind]| {
                    let mut skipped = vec![];
                    let mut usable = kinds.iter().filter(|kind| {
                        let refused = **kind == EngineKind::Mma && refusing.contains(&rank.rank());
                        if refused {
                            skipped.push("mma: of a test".to_string());
                        }
                        !refused
                    });
                    let kind = *usable.next().expect("the last engine is not refused");
                    let engine: Arc<dyn AttentionEngine> = Arc::new(Portable);
                    Ok::<_, BuildError>(SelectedEngine {
                        kind,
                        engine,
                        skipped,
                    })
                };
                let selected = agree(&*rank.communicator(), select)?;
                Ok::<_, BuildError>((selected.kind, selected.skipped))
            };
            World::threads(3).unwrap().run(run).unwrap()
        };
        assert_eq!(selected(&[]), vec![(EngineKind::Mma, vec![]); 3]);
        let found = selected(&[1]);
        assert!(found.iter().all(|(kind, _)| *kind == EngineKind::Portable));
        let other = "mma: another rank of the tensor axis cannot use it";
        let reasons: Vec<_> = found
            .iter()
            .map(|(_, skipped)| skipped.join("; "))
            .collect();
        assert_eq!(reasons, [other, "mma: of a test", other]);
    }
}
