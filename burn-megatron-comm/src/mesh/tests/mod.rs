//! Tests of the mesh: worked examples, properties over random meshes, and the text of messages.

mod golden;
mod messages;
mod properties;
mod values;
