//! The loss curve as SVG.

use std::ops::Range;

use burn_megatron_plot::{Area, FAINT, FONT, PlotError, TEXT, failed, render};
use plotters::prelude::*;

use super::LossCurve;

pub(super) const WIDTH: u32 = 960;
/// The size of a chart, in pixels.
pub(super) const CHART_SIZE: (u32, u32) = (WIDTH, 540);
const RAW: RGBColor = RGBColor(158, 202, 225);
const SMOOTHED: RGBColor = RGBColor(8, 81, 156);
const HELD_OUT: RGBColor = RGBColor(217, 95, 14);
const OBJECTIVE: RGBColor = RGBColor(189, 189, 189);

pub(super) type Axes =
    Cartesian2d<plotters::coord::types::RangedCoordusize, plotters::coord::types::RangedCoordf64>;
pub(super) type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Axes>;

pub(super) fn draw(curve: &LossCurve) -> Result<String, PlotError> {
    render(CHART_SIZE, |area| draw_on(area, curve))
}

fn draw_on(area: &Area<'_>, curve: &LossCurve) -> Result<(), PlotError> {
    let (first, last) = curve.steps();
    let mut chart = chart(area, &curve.title, first..last, curve.losses())?;
    mesh(&mut chart, curve.step_label())?;
    draw_objective(&mut chart, curve)?;
    draw_training(&mut chart, curve)?;
    draw_held_out(&mut chart, curve)?;
    if curve.training.is_empty() && curve.held_out.is_empty() {
        Ok(()) // an empty legend would be an empty box
    } else {
        legend(&mut chart)
    }
}

/// Draws a chart with axes for steps and losses.
pub(super) fn chart<'a, 'b>(
    area: &'a Area<'b>,
    title: &str,
    steps: Range<usize>,
    (low, high): (f64, f64),
) -> Result<Chart<'a, 'b>, PlotError> {
    area.fill(&WHITE).map_err(failed)?;
    ChartBuilder::on(area)
        .caption(title, (FONT, title_size(title)).into_font().color(&TEXT))
        .margin(16)
        .margin_right(32) // for the last label of the horizontal axis
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(steps, low..high)
        .map_err(failed)
}

/// Returns the font size at which a title fits the width of a chart.
fn title_size(title: &str) -> u32 {
    let letters = title.chars().count().max(1) as u32;
    // The width of a letter is about half of its height.
    (2 * (WIDTH - 64) / letters).clamp(12, 24)
}

pub(super) fn mesh(chart: &mut Chart<'_, '_>, step_label: String) -> Result<(), PlotError> {
    mesh_of(chart, step_label, "loss (nats per token)", 9)
}

/// Draws axes with these names and a given number of labels on the vertical axis.
pub(super) fn mesh_of(
    chart: &mut Chart<'_, '_>,
    step_label: String,
    name: &str,
    labels: usize,
) -> Result<(), PlotError> {
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(TEXT)
        .x_labels(11)
        .y_labels(labels)
        .label_style((FONT, 15).into_font().color(&TEXT))
        .axis_desc_style((FONT, 17).into_font().color(&TEXT))
        .x_desc(step_label)
        .y_desc(name)
        .draw()
        .map_err(failed)
}

pub(super) fn legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>) -> Result<(), PlotError> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(12)
        .legend_area_size(36)
        .background_style(WHITE.mix(0.85))
        .border_style(FAINT)
        .label_font((FONT, 16).into_font().color(&TEXT))
        .draw()
        .map_err(failed)
}

/// Draws the objective below the training curve.
fn draw_objective(chart: &mut Chart<'_, '_>, curve: &LossCurve) -> Result<(), PlotError> {
    if curve.objective.is_empty() {
        return Ok(());
    }
    let line = LossCurve::downsample(&curve.objective);
    chart
        .draw_series(LineSeries::new(line, OBJECTIVE.stroke_width(1)))
        .map_err(failed)?
        .label("objective")
        .legend(|at| legend_line(at, OBJECTIVE, 1));
    Ok(())
}

fn draw_training(chart: &mut Chart<'_, '_>, curve: &LossCurve) -> Result<(), PlotError> {
    match curve.training[..] {
        [] => {}
        // A line with a single point would not be visible.
        [point] => {
            chart
                .draw_series([Circle::new(point, 4, SMOOTHED.filled())])
                .map_err(failed)?
                .label("training")
                .legend(|(x, y)| Circle::new((x + 14, y), 4, SMOOTHED.filled()));
        }
        _ if !curve.is_smoothed() => {
            let line = LineSeries::new(
                LossCurve::downsample(&curve.training),
                SMOOTHED.stroke_width(2),
            );
            chart
                .draw_series(line)
                .map_err(failed)?
                .label("training")
                .legend(|at| legend_line(at, SMOOTHED, 2));
        }
        _ => {
            let line = LineSeries::new(LossCurve::downsample(&curve.training), RAW.stroke_width(1));
            chart
                .draw_series(line)
                .map_err(failed)?
                .label("training")
                .legend(|at| legend_line(at, RAW, 1));
            let line = LineSeries::new(curve.smoothed(), SMOOTHED.stroke_width(2));
            chart
                .draw_series(line)
                .map_err(failed)?
                .label("training, smoothed")
                .legend(|at| legend_line(at, SMOOTHED, 2));
        }
    }
    Ok(())
}

fn draw_held_out(chart: &mut Chart<'_, '_>, curve: &LossCurve) -> Result<(), PlotError> {
    let points = &curve.held_out;
    if points.is_empty() {
        return Ok(());
    }
    let line = LineSeries::new(points.iter().copied(), HELD_OUT.stroke_width(2));
    chart.draw_series(line).map_err(failed)?;
    let dot = |at| Circle::new(at, 4, HELD_OUT.filled());
    chart
        .draw_series(points.iter().copied().map(dot))
        .map_err(failed)?
        .label("held-out")
        .legend(|(x, y)| Circle::new((x + 14, y), 4, HELD_OUT.filled()));
    Ok(())
}

/// Returns the line of a legend entry.
pub(super) fn legend_line(
    (x, y): (i32, i32),
    color: RGBColor,
    width: u32,
) -> PathElement<(i32, i32)> {
    PathElement::new([(x, y), (x + 28, y)], color.stroke_width(width))
}
