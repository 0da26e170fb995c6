//! Scales and histories for checkpoints.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::history::{AmaxHistory, ScaleState};
use super::{Fp8, Fp8Error, Fp8Layer, Operand};
use crate::glob::{Glob, nearest};

/// The scales and histories of a layer with delayed scaling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fp8LayerState {
    /// Of the input.
    pub input: ScaleState,
    /// Of the weight.
    pub weight: ScaleState,
    /// Of the gradient of the output.
    pub gradient: ScaleState,
}

impl Fp8LayerState {
    /// Of one tensor.
    pub fn of(&self, operand: Operand) -> &ScaleState {
        match operand {
            Operand::Input => &self.input,
            Operand::Weight => &self.weight,
            Operand::Gradient => &self.gradient,
        }
    }
}

impl Fp8 {
    /// The states of the layers with delayed scaling, by their paths; other recipes have none. They are
    /// the same on all ranks of a stage.
    pub fn states(&self) -> BTreeMap<String, Fp8LayerState> {
        let layers = self.layers().into_iter();
        layers
            .filter_map(|layer| Some((layer.path().to_string(), layer.saved()?)))
            .collect()
    }

    /// Goes back to these states. There may be more, as of other stages of a pipeline.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::NoState`] where a layer with delayed scaling has none, [`Fp8Error::State`] where one
    /// does not fit. No layer has changed then.
    pub fn load(&self, states: &BTreeMap<String, Fp8LayerState>) -> Result<(), Fp8Error> {
        let mut found = vec![];
        for layer in self.layers() {
            if layer.saved().is_none() {
                continue;
            }
            let Some(state) = states.get(layer.path()) else {
                let paths = states.keys().map(String::as_str);
                return Err(Fp8Error::NoState {
                    path: layer.path().into(),
                    nearest: Glob::parse(layer.path())
                        .map(|glob| nearest(&glob, paths))
                        .unwrap_or_default(),
                });
            };
            layer.histories(state)?;
            found.push((layer, state));
        }
        found
            .into_iter()
            .try_for_each(|(layer, state)| layer.restore(state))
    }
}

impl Fp8Layer {
    /// The state, with delayed scaling.
    pub(super) fn saved(&self) -> Option<Fp8LayerState> {
        let operands = self.state();
        let state = |operand: Operand| {
            let history = operands[operand as usize].history.as_ref();
            history.map(AmaxHistory::state)
        };
        Some(Fp8LayerState {
            input: state(Operand::Input)?,
            weight: state(Operand::Weight)?,
            gradient: state(Operand::Gradient)?,
        })
    }

    /// Goes back to a state; nothing changes where it does not fit.
    pub(super) fn restore(&self, state: &Fp8LayerState) -> Result<(), Fp8Error> {
        let histories = self.histories(state)?;
        let mut operands = self.state();
        let mut is_new = false;
        for (operand, history) in operands.iter_mut().zip(histories) {
            if operand.history != history {
                operand.history = history;
                operand.rescaled();
                is_new = true;
            }
        }
        drop(operands);
        if is_new {
            self.forget_weight();
        }
        Ok(())
    }

    /// The histories that a state gives.
    fn histories(&self, state: &Fp8LayerState) -> Result<[Option<AmaxHistory>; 3], Fp8Error> {
        let operands = self.state();
        let mut histories = [None, None, None];
        for operand in Operand::ALL {
            let Some(mut history) = operands[operand as usize].history.clone() else {
                continue;
            };
            let restored = history.restore(state.of(operand));
            restored.map_err(|reason| Fp8Error::State {
                path: self.path().into(),
                operand,
                reason,
            })?;
            histories[operand as usize] = Some(history);
        }
        Ok(histories)
    }
}
