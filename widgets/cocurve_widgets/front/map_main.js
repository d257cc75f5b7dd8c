import { renderMap } from "./map.js";

export default { render: renderMap };
