// What the page says of the patch under the pointer, and which patches went the same way. One listener for all pictures.
(() => {
  const squares = (places, columns) =>
    places.map((place) => `M${place % columns} ${Math.floor(place / columns)}h1v1h-1z`).join("");

  // the border of a set of patches, so that one of hundreds does not hide the picture under a grid
  const border = (places, columns) => {
    const own = new Set(places);
    const side = (free, path) => (free ? path : "");
    return places
      .map((place) => {
        const [row, column] = [Math.floor(place / columns), place % columns];
        return (
          side(!own.has(place - columns), `M${column} ${row}h1`) +
          side(!own.has(place + columns), `M${column} ${row + 1}h1`) +
          side(column === 0 || !own.has(place - 1), `M${column} ${row}v1`) +
          side(column === columns - 1 || !own.has(place + 1), `M${column + 1} ${row}v1`)
        );
      })
      .join("");
  };

  const times = (value) => `${value.toFixed(2)} x`;

  const words = (data, place) => {
    const [row, column] = [Math.floor(place / data.columns) + 1, (place % data.columns) + 1];
    const parts = [`Row ${row}, column ${column}: <b>${fate(data, place)}</b>`];
    if (data.rank) parts.push(`rank ${data.rank[place]} of ${data.count} by ${data.by} saliency`);
    const saliencies = ["vision", "cross", "fused"].filter((name) => data[name]);
    if (saliencies.length) {
      const each = saliencies.map((name) => `${name} ${times(data[name][place])}`).join(", ");
      parts.push(`saliency, mean = 1: ${each}`);
    }
    return parts.join("<br>");
  };

  const fate = (data, place) => {
    const slot = data.slot[place];
    if (!slot) return "dropped";
    if (data.kept[place] && data.size[place] < 2) return "kept as it is";
    const others = data.size[place] - 1;
    if (data.kept[place]) return `kept, and ${others} others were merged into it`;
    const own = data.head[place] ? ", of which it is the anchor" : "";
    return `merged into a token of ${data.size[place]} patches${own}`;
  };

  const show = (picture, place) => {
    const data = (picture.patches ??= JSON.parse(picture.dataset.patches));
    const [row, column] = [Math.floor(place / data.columns), place % data.columns];
    if (place < 0 || row >= data.rows || column >= data.columns) return;
    picture.dataset.place = place;
    const slot = data.slot[place];
    const group = slot ? data.slot.flatMap((own, index) => (own === slot ? [index] : [])) : [];
    picture.querySelector(".cd-group").setAttribute("d", squares(group, data.columns));
    picture.querySelector(".cd-edge").setAttribute("d", border(group, data.columns));
    picture.querySelector(".cd-here").setAttribute("d", squares([place], data.columns));
    picture.closest(".cd-column").querySelector(".cd-readout").innerHTML = words(data, place);
  };

  const under = (picture, event) => {
    const svg = picture.querySelector("svg");
    const [edges, box] = [svg.getBoundingClientRect(), svg.viewBox.baseVal];
    const column = Math.floor(box.x + ((event.clientX - edges.left) / edges.width) * box.width);
    const row = Math.floor(box.y + ((event.clientY - edges.top) / edges.height) * box.height);
    const columns = (picture.patches ??= JSON.parse(picture.dataset.patches)).columns;
    return row * columns + column;
  };

  const pointed = (event) => {
    const picture = event.target.closest?.(".cd-picture");
    if (picture) show(picture, under(picture, event));
  };

  document.addEventListener("pointermove", pointed);
  document.addEventListener("pointerdown", pointed);
  // Chromium stops at lists that scroll, and those of Gradio's menus vanish as soon as they are reached. Gradio opens a
  // menu that was left by Tab again when it is told of the key, which the browser alone needs to know.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Tab") return;
    document.querySelectorAll("[role=listbox]").forEach((list) => (list.tabIndex = -1));
    event.stopPropagation();
  }, true);
  document.addEventListener("keydown", (event) => {
    const picture = event.target.closest?.(".cd-picture");
    if (!picture) return;
    const data = (picture.patches ??= JSON.parse(picture.dataset.patches));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -data.columns, ArrowDown: data.columns };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const middle = Math.floor(data.rows / 2) * data.columns + Math.floor(data.columns / 2);
    show(picture, picture.dataset.place === undefined ? middle : Number(picture.dataset.place) + steps[event.key]);
  });
})();
