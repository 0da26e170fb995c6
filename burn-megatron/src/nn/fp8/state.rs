//! Saving and loading scales and histories.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::history::{AmaxHistory, ScaleState};
use super::{Fp8, Fp8Error, Fp8Layer, Operand};
use crate::glob::{Glob, nearest};

/// The scales and histories of a layer with delayed scaling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fp8LayerState {
    /// State of the input.
    pub input: ScaleState,
    /// State of the weight.
    pub weight: ScaleState,
    /// State of the gradient of the output.
    pub gradient: ScaleState,
}

impl Fp8LayerState {
    /// The state of one operand.
    pub fn of(&self, operand: Operand) -> &ScaleState {
        match operand {
            Operand::Input => &self.input,
            Operand::Weight => &self.weight,
            Operand::Gradient => &self.gradient,
        }
    }
}

impl Fp8 {
    /// The states of the layers with delayed scaling, by path; other recipes have none. All ranks of a
    /// stage have the same states.
    pub fn states(&self) -> BTreeMap<String, Fp8LayerState> {
        let layers = self.layers().into_iter();
        layers
            .filter_map(|layer| Some((layer.path().to_string(), layer.delayed_state()?)))
            .collect()
    }

    /// Restores these states. There may be more, such as those of other pipeline stages.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::MissingState`] if a layer with delayed scaling has none, [`Fp8Error::State`] if one does
    /// not fit. Then no layer was changed.
    pub fn load(&self, states: &BTreeMap<String, Fp8LayerState>) -> Result<(), Fp8Error> {
        let mut found = vec![];
        for layer in self.layers() {
            if layer.delayed_state().is_none() {
                continue;
            }
            let Some(state) = states.get(layer.path()) else {
                let paths = states.keys().map(String::as_str);
                return Err(Fp8Error::MissingState {
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
    pub(super) fn delayed_state(&self) -> Option<Fp8LayerState> {
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

    /// Restores a state; changes nothing if it does not fit.
    pub(super) fn restore(&self, state: &Fp8LayerState) -> Result<(), Fp8Error> {
        let histories = self.histories(state)?;
        let mut operands = self.state();
        let mut is_changed = false;
        for (operand, history) in operands.iter_mut().zip(histories) {
            if operand.history != history {
                operand.history = history;
                operand.drop_scale();
                is_changed = true;
            }
        }
        drop(operands);
        if is_changed {
            self.drop_cached_weight();
        }
        Ok(())
    }

    /// The histories of a state.
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
