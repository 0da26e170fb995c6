//! Saving and loading the scales and histories of delayed scaling.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::config::Fp8Recipe;
use super::history::ScaleState;
use super::{Fp8, Fp8Error, Fp8Layer, Operand};
use crate::glob::{Glob, nearest};

/// The scales and histories of a layer with delayed scaling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fp8LayerState {
    /// The state of the input.
    pub input: ScaleState,
    /// The state of the weight.
    pub weight: ScaleState,
    /// The state of the gradient of the output.
    pub gradient: ScaleState,
}

impl Fp8LayerState {
    /// Returns the state of one operand.
    pub fn of(&self, operand: Operand) -> &ScaleState {
        match operand {
            Operand::Input => &self.input,
            Operand::Weight => &self.weight,
            Operand::Gradient => &self.gradient,
        }
    }
}

impl Fp8 {
    /// Returns the states of the layers with delayed scaling, keyed by layer path. Other recipes have no state. All
    /// ranks of a stage have the same states. The first call after a step synchronizes with the device.
    pub fn states(&self) -> BTreeMap<String, Fp8LayerState> {
        let layers = self.layers().into_iter();
        layers
            .filter_map(|layer| Some((layer.path().to_string(), layer.delayed_state()?)))
            .collect()
    }

    /// Restores the states of the layers with delayed scaling. Additional states, such as states of other pipeline
    /// stages, are ignored.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::MissingState`] if the state of a layer with delayed scaling is missing. [`Fp8Error::State`] if a
    /// state does not fit its layer. In both cases no layer is changed.
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
            layer.check_state(state)?;
            found.push((layer, state));
        }
        found
            .into_iter()
            .try_for_each(|(layer, state)| layer.restore(state))
    }
}

impl Fp8Layer {
    /// Returns the state of a layer with delayed scaling.
    pub(super) fn delayed_state(&self) -> Option<Fp8LayerState> {
        let Fp8Recipe::Delayed(_) = self.shared.recipe else {
            return None;
        };
        let states = self.shared.model.buffers.states(self.shared.first_slot);
        let [input, weight, gradient] = states;
        Some(Fp8LayerState {
            input,
            weight,
            gradient,
        })
    }

    /// Restores a state. Changes nothing if the state does not fit.
    pub(super) fn restore(&self, state: &Fp8LayerState) -> Result<(), Fp8Error> {
        self.check_state(state)?;
        if self.delayed_state().is_some_and(|own| own != *state) {
            let states = Operand::ALL.map(|operand| state.of(operand).clone());
            self.shared
                .model
                .buffers
                .restore(self.shared.first_slot, states);
            self.drop_cached_weight();
        }
        Ok(())
    }

    /// Checks that a state fits the layer.
    fn check_state(&self, state: &Fp8LayerState) -> Result<(), Fp8Error> {
        let Fp8Recipe::Delayed(settings) = self.shared.recipe else {
            return Ok(());
        };
        Operand::ALL.into_iter().try_for_each(|operand| {
            let checked = state.of(operand).check(settings.history);
            checked.map_err(|reason| Fp8Error::State {
                path: self.path().into(),
                operand,
                reason,
            })
        })
    }
}
